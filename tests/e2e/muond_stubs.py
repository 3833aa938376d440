"""What any foreign language gets from protoc: messages and stubs of the optimizer service, and of
gRPC's health and reflection services. Made at import, in a directory that goes with the process."""

import atexit
import pathlib
import shutil
import subprocess
import sys
import tempfile

from muond_process import ROOT

# The wire format of two services that Debian packages for C++, but not for Python. The file names
# keep the modules out of the package `grpc`.
HEALTH = """
syntax = "proto3";
package grpc.health.v1;
message HealthCheckRequest { string service = 1; }
message HealthCheckResponse {
  enum ServingStatus { UNKNOWN = 0; SERVING = 1; NOT_SERVING = 2; SERVICE_UNKNOWN = 3; }
  ServingStatus status = 1;
}
service Health {
  rpc Check(HealthCheckRequest) returns (HealthCheckResponse);
  rpc Watch(HealthCheckRequest) returns (stream HealthCheckResponse);
}
"""
REFLECTION = """
syntax = "proto3";
package grpc.reflection.v1alpha;
message ServerReflectionRequest {
  string host = 1;
  oneof message_request { string file_containing_symbol = 4; string list_services = 7; }
}
message FileDescriptorResponse { repeated bytes file_descriptor_proto = 1; }
message ListServiceResponse { repeated ServiceResponse service = 1; }
message ServiceResponse { string name = 1; }
message ServerReflectionResponse {
  string valid_host = 1;
  oneof message_response {
    FileDescriptorResponse file_descriptor_response = 4;
    ListServiceResponse list_services_response = 6;
  }
}
service ServerReflection {
  rpc ServerReflectionInfo(stream ServerReflectionRequest)
      returns (stream ServerReflectionResponse);
}
"""


def _generate():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="muond-stubs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "health_service.proto").write_text(HEALTH)
    (folder / "reflection_service.proto").write_text(REFLECTION)
    subprocess.run(
        ["protoc", f"-I{ROOT / 'proto'}", f"-I{folder}", f"--python_out={folder}",
         f"--grpc_python_out={folder}",
         f"--plugin=protoc-gen-grpc_python={shutil.which('grpc_python_plugin')}",
         "muond/v1/types.proto", "muond/v1/arena.proto", "muond/v1/optimizer.proto",
         "muond/v1/peer.proto",
         "muond/v1/checkpoint.proto", "health_service.proto", "reflection_service.proto"],
        check=True)
    sys.path.insert(0, str(folder))


_generate()

# pylint: disable=wrong-import-position,import-error,unused-import
from muond.v1 import checkpoint_pb2 as checkpoint  # noqa: E402,F401
from muond.v1 import checkpoint_pb2_grpc as checkpoint_grpc  # noqa: E402,F401
from muond.v1 import optimizer_pb2 as optimizer  # noqa: E402,F401
from muond.v1 import optimizer_pb2_grpc as optimizer_grpc  # noqa: E402,F401
from muond.v1 import peer_pb2 as peer  # noqa: E402,F401
from muond.v1 import peer_pb2_grpc as peer_grpc  # noqa: E402,F401
from muond.v1 import types_pb2 as types  # noqa: E402,F401
import health_service_pb2 as health  # noqa: E402,F401
import health_service_pb2_grpc as health_grpc  # noqa: E402,F401
import reflection_service_pb2 as reflection  # noqa: E402,F401
import reflection_service_pb2_grpc as reflection_grpc  # noqa: E402,F401
