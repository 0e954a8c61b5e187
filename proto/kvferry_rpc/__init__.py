"""Generated gRPC stubs of kvferry; `make protos` writes them from the .proto files beside this one."""
