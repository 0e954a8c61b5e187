"""The router: requests in over HTTP and gRPC, a plan and two workers for each, text and a receipt out."""
