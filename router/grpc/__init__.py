"""The gRPC front door: kvferry's own API with the abilities of the HTTP one."""
