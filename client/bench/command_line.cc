#include "client/bench/command_line.h"

#include <unistd.h>

#include <map>
#include <set>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond::bench {
namespace {

constexpr char kDescription[] =
    "muond-bench - trains a synthetic model against a daemon and times push, step and pull.\n"
    "Opens a run of its own and closes it again, also at Ctrl-C. Exit codes: 0 fine, 1 error,\n"
    "2 usage, 3 measured, but a result is wrong, 130 interrupted.";

struct Words {
  std::string model = "tiny";
  std::string dtype = "f32";
  std::string momentum_dtype = "f32";
  bool no_ceilings = false;
};

void AddTarget(CLI::App& app, CommandLine& line, Words& words) {
  auto* endpoint =
      app.add_option("--endpoint,--target", line.options.endpoint,
                     "unix:///path or host:port [MUOND_ENDPOINT, else 127.0.0.1:7070]");
  TlsFiles& tls = line.options.tls;
  app.add_option("--tls-cert", tls.certificate,
                 "this trainer's certificate, with --tls-key and --tls-ca [MUOND_TLS_CERT]");
  app.add_option("--tls-key", tls.key, "its private key [MUOND_TLS_KEY]");
  app.add_option("--tls-ca", tls.authority, "the authority's certificates [MUOND_TLS_CA]");
  app.add_option("--tls-server-name", tls.server_name,
                 "name in the daemon's certificate [MUOND_TLS_SERVER_NAME]");
  auto* in_process =
      app.add_flag("--in-process", line.in_process, "a service of this process, no daemon")
          ->excludes(endpoint);
  app.add_option("--backend", line.backend, "of --in-process: auto, cpu, reference or cuda [cpu]")
      ->needs(in_process);
  app.add_option("--threads", line.options.threads,
                 "of the ceilings and of --in-process; 0: one per core [0]")
      ->check(CLI::Range(0, 4096));
  app.add_option("--transport", line.transports,
                 "how gradients and parameters go, several in turn: auto, grpc, arena, ipc, nccl, "
                 "pointer [grpc]")
      ->delimiter(',');
  app.add_option("--gpu", line.options.gpu,
                 "gradients and parameters lie in this GPU's memory (CUDA ordinal); -1: the host's "
                 "[-1; 0 for ipc and nccl]")
      ->check(CLI::Range(-1, 1023));
  app.add_option("--backward-ms", line.options.backward_ms,
                 "of --gpu: gradients become ready over this long; a step is what is exposed "
                 "behind the last [0: all at once, a step is everything]")
      ->check(CLI::Range(0.0, 1e5));
  app.add_flag("--probe-control", line.options.probe_control,
               "time small calls while bytes flow");
}

void AddWork(CLI::App& app, CommandLine& line, Words& words) {
  BenchmarkOptions& options = line.options;
  app.add_option("--model", words.model, absl::StrFormat("%s [tiny]", models::ModelNames()));
  app.add_option("--dtype", words.dtype, "of gradients and parameters [f32]")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  app.add_option("--momentum-dtype", words.momentum_dtype,
                 "that the daemon keeps Muon's momentum in [f32]")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--steps", options.steps, "measured steps [20]")->check(CLI::Range(1, 1'000'000));
  app.add_option("--warmup", options.warmup, "steps before them [2]")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--chunk-bytes", options.chunk_bytes, "payload of one message [1048576]")
      ->check(CLI::Range(4096, 1 << 30));
  app.add_option("--run", options.run, "name of the run [bench-<pid>]");
  app.add_option("--seed", options.seed, "of gradients and initial values [1]");
}

void AddOutput(CLI::App& app, CommandLine& line, Words& words) {
  app.add_option("--json", line.json, "write the result there too; - is stdout, and no table");
  app.add_flag("--no-ceilings", words.no_ceilings,
               "don't measure memcpy, products and a bare stream first");
  app.add_flag("--check-memory", line.memory_must_fit,
               "exit with 3 when the daemon held over 10 % more memory than the run needs");
  app.add_flag("--paced", line.paced,
               "wait for a line on stdin before each measured step, print it as JSON after it");
  app.add_option("--serve-bare-stream", line.bare_stream_socket)->group("");
  app.add_option("--reference-lr-factor", line.options.reference_lr_factor)->group("");
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv,
                                             const std::string& endpoint) {
  CommandLine line;
  Words words;
  line.options.run = absl::StrFormat("bench-%d", getpid());
  CLI::App app(kDescription, "muond-bench");
  app.set_version_flag("--version", "muond-bench " MUOND_VERSION);
  AddTarget(app, line, words);
  AddWork(app, line, words);
  AddOutput(app, line, words);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    line.text = app.help();
    return line;
  } catch (const CLI::CallForVersion&) {
    line.text = app.version() + "\n";
    return line;
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  if (line.transports.empty()) line.transports = {"grpc"};
  BenchmarkOptions& options = line.options;
  for (std::string& transport : line.transports) {
    if (transport == "ipc") transport = "cuda-ipc";
    const std::set<std::string> known = {"auto", "grpc", "arena", "cuda-ipc", "nccl", "pointer"};
    if (!known.contains(transport)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "--transport \"%s\": expected auto, grpc, arena, ipc, nccl or pointer", transport));
    }
    if ((transport == "cuda-ipc" || transport == "nccl") && options.gpu < 0) options.gpu = 0;
  }
  options.transport = line.transports.front();
  if (options.endpoint.empty()) options.endpoint = endpoint.empty() ? "127.0.0.1:7070" : endpoint;
  if (line.in_process) options.endpoint.clear();
  options.ceilings = !words.no_ceilings;
  const std::map<std::string, Dtype> dtypes = {
      {"f32", Dtype::kF32}, {"bf16", Dtype::kBF16}, {"f16", Dtype::kF16}};
  options.dtype = dtypes.at(words.dtype);
  options.momentum_dtype = dtypes.at(words.momentum_dtype);
  MUOND_ASSIGN_OR_RETURN(options.model, models::ParseModel(words.model));
  return line;
}

}  // namespace muond::bench
