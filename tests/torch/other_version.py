"""A server that says that it is muond of another version, or, given no version, knows no muond at
all. Prints its address. Runs under Debian's Python, which has grpc."""

import concurrent.futures
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))

import grpc

import muond_stubs

server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
if sys.argv[1]:
    class Other(muond_stubs.optimizer_grpc.OptimizerServicer):
        def Status(self, request, context):
            return muond_stubs.optimizer.StatusReply(version=sys.argv[1])

    muond_stubs.optimizer_grpc.add_OptimizerServicer_to_server(Other(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(f"127.0.0.1:{port}", flush=True)
time.sleep(60)
