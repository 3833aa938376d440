#include "client/cpp/gpu_copy.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace muond::client {
namespace {

// The text is translated on machines with a GPU, where it is run too (gpu_memory_test).
TEST(GpuCopy, TheProgramIsOneThatTheTranslatorTakes) {
  const std::string ptxas = MUOND_PTXAS;
  if (ptxas.empty()) GTEST_SKIP() << "*** NO PTXAS HERE: THE PROGRAM FOR GPUS IS NOT CHECKED ***";
  std::string folder = "/tmp/muond-gpu-copy-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string program = folder + "/copy.ptx", machine_code = folder + "/copy.cubin";
  std::ofstream(program) << kGpuCopyProgram;
  for (const char* device : {"sm_80", "sm_90"}) {
    const std::string command =
        ptxas + " -arch=" + device + " -o " + machine_code + " " + program;
    EXPECT_EQ(std::system(command.c_str()), 0) << device;
    EXPECT_EQ(unlink(machine_code.c_str()), 0);
  }
  unlink(program.c_str());
  rmdir(folder.c_str());
  EXPECT_NE(std::string(kGpuCopyProgram).find(std::string(".entry ") + kGpuCopyName + "("),
            std::string::npos);
  EXPECT_EQ(sizeof(GpuCopies), 3072u) << "as the program declares it";
}

}  // namespace
}  // namespace muond::client
