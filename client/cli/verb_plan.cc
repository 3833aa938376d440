// `muonctl plan`: who would own what, before anything runs. Needs no daemon: it calls the function
// that the daemons themselves plan with.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>
#include <system_error>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/format.h"
#include "client/cli/machine_file.h"
#include "client/cli/message_json.h"
#include "client/cli/text_table.h"
#include "client/cli/verb.h"
#include "client/models/model.h"
#include "client/models/model_file.h"
#include "proto/check.h"
#include "server/registry/plan.h"
#include "server/registry/routing.h"
#include "server/registry/step_time.h"

namespace muond::cli {
namespace {

struct PlanFlags {
  std::string model;
  int daemons = 1;
  int devices = 1;
  std::int64_t memory_max = 0;
  bool overlap = false;
  std::int64_t buddy_steps = 0;
  std::string backend = "cpu";
  std::string dtype = "f32";
  std::string momentum_dtype;
  std::string machine;
  double link_gbps = 0;
};

void AddFlags(CLI::App& command, PlanFlags& flags) {
  command
      .add_option("--model", flags.model,
                  absl::StrFormat("a model file, or %s", models::ModelNames()))
      ->type_name("MODEL")
      ->required();
  command.add_option("--daemons", flags.daemons, "how many daemons")
      ->check(CLI::Range(1, static_cast<int>(kOwnersMax)))
      ->capture_default_str();
  command.add_option("--devices", flags.devices, "how many devices each of them has")
      ->check(CLI::Range(1, static_cast<int>(kOwnersMax)))
      ->capture_default_str();
  command
      .add_option("--memory-max", flags.memory_max,
                  "most bytes that a device may hold, as 80GiB; 0: no limit")
      ->type_name("BYTES")
      ->transform(CLI::AsSizeValue(true));
  command.add_flag("--overlap", flags.overlap, "Newton-Schulz starts before the verdict");
  command
      .add_option("--buddy-steps", flags.buddy_steps,
                  "as the daemons' setting: host memory that each holds for another is told, too")
      ->check(CLI::Range(0, 1'000'000));
  command.add_option("--backend", flags.backend, "whose memory to count: cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--dtype", flags.dtype, "of gradients where the file says nothing")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}))
      ->capture_default_str();
  command
      .add_option("--momentum-dtype", flags.momentum_dtype,
                  "what Muon's momentum is kept in: f32 [f32], bf16; in place of what a file says")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command
      .add_option("--machine", flags.machine,
                  absl::StrFormat("tells how long a step will take on it: %s, or a file of rates",
                                  absl::StrJoin(KnownMachines(), ", ")))
      ->type_name("MACHINE");
  command
      .add_option("--link-gbps", flags.link_gbps,
                  "of each owner with the trainers, 1e9 bytes a second, in place of the machine's")
      ->check(CLI::PositiveNumber)
      ->needs("--machine");
}

// A file where there is one of that name, else a model by name.
absl::StatusOr<RunSpec> LoadModel(const PlanFlags& flags) {
  Dtype dtype = Dtype::kF32;
  if (flags.dtype == "bf16") dtype = Dtype::kBF16;
  if (flags.dtype == "f16") dtype = Dtype::kF16;
  std::error_code ignored;
  if (std::filesystem::exists(flags.model, ignored)) {
    return models::LoadModelFile(flags.model, dtype);
  }
  const absl::StatusOr<models::Model> model = models::ParseModel(flags.model);
  if (!model.ok()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s, or a model file that exists", model.status().message()));
  }
  return models::MakeRunSpec(*model, "plan", dtype);
}

absl::StatusOr<RunSpec> LoadRun(const PlanFlags& flags) {
  MUOND_ASSIGN_OR_RETURN(RunSpec run, LoadModel(flags));
  for (GroupSpec& group : run.groups) {
    if (flags.momentum_dtype.empty() || group.algorithm == Algorithm::kAdamW) continue;
    group.momentum_dtype = flags.momentum_dtype == "bf16" ? Dtype::kBF16 : Dtype::kF32;
  }
  return run;
}

// The loads of a daemon's devices together; flops: of the busiest of them.
OwnerLoad DaemonLoad(const PlanFlags& flags, const Plan& plan, int daemon) {
  OwnerLoad sum{.place = {daemon, 0}};
  for (int device = 0; device < flags.devices; ++device) {
    const OwnerLoad& owner = plan.owners[daemon * flags.devices + device];
    sum.flops = std::max(sum.flops, owner.flops);
    sum.matrices += owner.matrices;
    sum.elements += owner.elements;
    sum.state_bytes += owner.state_bytes;
    sum.staging_bytes += owner.staging_bytes;
    sum.scratch_bytes += owner.scratch_bytes;
    sum.bytes_in += owner.bytes_in;
    sum.bytes_out += owner.bytes_out;
  }
  return sum;
}

// Host memory for buddies, at most: the copy that a daemon's own snapshot is sent from, and of the
// daemon before it the last snapshot, the next one on its way, and the gradients of so many steps
// (each in its dtype; fp32 where several ranks' or micro-batches' are summed).
std::int64_t BuddyBytes(const PlanFlags& flags, const Plan& plan, int daemon) {
  if (flags.buddy_steps == 0 || flags.daemons < 2) return 0;
  const OwnerLoad own = DaemonLoad(flags, plan, daemon);
  const OwnerLoad held =
      DaemonLoad(flags, plan, (daemon + flags.daemons - 1) % flags.daemons);
  return own.state_bytes + 2 * held.state_bytes + flags.buddy_steps * held.staging_bytes;
}

// What goes to a buddy in a step on average: its gradients, and a snapshot every so many steps.
double BuddyBytesPerStep(const PlanFlags& flags, const Plan& plan, int daemon) {
  if (flags.buddy_steps == 0 || flags.daemons < 2) return 0;
  const OwnerLoad own = DaemonLoad(flags, plan, daemon);
  const auto between = static_cast<double>((flags.buddy_steps + 1) / 2);
  return static_cast<double>(own.staging_bytes) + static_cast<double>(own.state_bytes) / between;
}

double ShareOfLargest(const Plan& plan, const OwnerLoad& load) {
  return plan.largest_flops == 0 ? 0 : load.flops / plan.largest_flops;
}

Json LoadJson(const Plan& plan, const OwnerLoad& load) {
  return {{"newton_schulz_flops", load.flops},   {"share_of_largest", ShareOfLargest(plan, load)},
          {"matrices", load.matrices},           {"elements", load.elements},
          {"state_bytes", load.state_bytes},     {"staging_bytes", load.staging_bytes},
          {"scratch_bytes", load.scratch_bytes}, {"memory_bytes", load.MemoryBytes()},
          {"bytes_in", load.bytes_in},           {"bytes_out", load.bytes_out}};
}

Json PlanJson(const PlanFlags& flags, const Routing& routing, const Plan& plan) {
  Json daemons = Json::array();
  for (int daemon = 0; daemon < flags.daemons; ++daemon) {
    Json entry = {{"daemon", daemon}};
    Json devices = Json::array();
    for (int device = 0; device < flags.devices; ++device) {
      Json one = {{"device", device}};
      one.update(LoadJson(plan, plan.owners[daemon * flags.devices + device]));
      devices.push_back(std::move(one));
    }
    entry.update(LoadJson(plan, DaemonLoad(flags, plan, daemon)));
    entry["devices"] = std::move(devices);
    entry["buddy_bytes"] = BuddyBytes(flags, plan, daemon);
    entry["buddy_bytes_per_step"] = BuddyBytesPerStep(flags, plan, daemon);
    daemons.push_back(std::move(entry));
  }
  const SplitAdvice& split = plan.split;
  return {{"model", flags.model},
          {"hash", plan.hash},
          {"parameters", routing.parameters.size()},
          {"muon_parameters", routing.muon_parameters},
          {"adamw_parameters", routing.adamw_parameters},
          {"matrices", routing.muon_matrices},
          {"shards", plan.shards.size()},
          {"owners", plan.owners.size()},
          {"newton_schulz_flops", plan.total_flops},
          {"mean_flops", plan.MeanFlops()},
          {"largest_flops", plan.largest_flops},
          {"floor_flops", plan.floor_flops},
          {"imbalance_over_floor", plan.imbalance_over_floor},
          {"floor_over_mean", plan.total_flops == 0 ? 1 : plan.floor_flops / plan.MeanFlops()},
          {"split",
           {{"helps", split.helps},
            {"reason", split.reason},
            {"rows", split.rows},
            {"cols", split.cols},
            {"matrices", split.count},
            {"matrix_flops", plan.largest_matrix_flops},
            {"gain", split.gain},
            {"gram_bytes", split.gram_bytes}}},
          {"daemons", std::move(daemons)}};
}

Json StepTimeJson(const MachineRates& rates, const StepTime& time) {
  const OwnerTime& busiest = time.owners[time.busiest];
  return {{"machine", rates.name},
          {"link_gbps", rates.link_gbps},
          {"step_ms", time.step_ms},
          {"busiest_owner", time.busiest},
          {"newton_schulz_ms", busiest.newton_schulz_ms},
          {"passes_ms", busiest.passes_ms},
          {"link_ms", busiest.link_ms},
          {"calls_ms", time.calls_ms},
          {"efficiency", time.efficiency}};
}

std::string StepTimeText(const MachineRates& rates, const StepTime& time) {
  const OwnerTime& busiest = time.owners[time.busiest];
  return absl::StrFormat(
      "step on %s, links of %s GB/s: about %s ms: Newton-Schulz %s, other passes %s, gradients and "
      "parameters %s (all of owner %d, the busiest), calls and votes %s; %.1f%% of one owner's "
      "speed times %d\n",
      rates.name, FormatNumber(rates.link_gbps), FormatNumber(time.step_ms),
      FormatNumber(busiest.newton_schulz_ms), FormatNumber(busiest.passes_ms),
      FormatNumber(busiest.link_ms), time.busiest, FormatNumber(time.calls_ms),
      100 * time.efficiency, time.owners.size());
}

std::string Counted(std::int64_t count, const char* what) {
  return absl::StrFormat("%d %s%s", count, what, count == 1 ? "" : "s");
}

std::string LoadTable(const PlanFlags& flags, const Plan& plan, bool color) {
  TextTable table;
  for (const char* name : {"DAEMON", "DEVICE", "MATRICES", "ELEMENTS", "NS TFLOP", "OF LARGEST",
                           "STATE", "STAGING", "SCRATCH", "MEMORY", "IN/STEP", "OUT/STEP"}) {
    if (flags.devices > 1 || name != std::string("DEVICE")) table.AddColumn(name, Align::kRight);
  }
  for (const OwnerLoad& load : plan.owners) {
    std::vector<Cell> row = {{FormatCount(load.place.daemon)}};
    if (flags.devices > 1) row.push_back({FormatCount(load.place.device)});
    for (std::string text :
         {FormatCount(load.matrices), FormatCount(load.elements), FormatNumber(load.flops / 1e12),
          absl::StrFormat("%.1f%%", 100 * ShareOfLargest(plan, load)),
          FormatBytes(load.state_bytes), FormatBytes(load.staging_bytes),
          FormatBytes(load.scratch_bytes), FormatBytes(load.MemoryBytes()),
          FormatBytes(load.bytes_in), FormatBytes(load.bytes_out)}) {
      row.push_back({std::move(text)});
    }
    table.AddRow(std::move(row));
  }
  return table.Render(color);
}

std::string BuddyText(const PlanFlags& flags, const Plan& plan) {
  if (flags.buddy_steps == 0 || flags.daemons < 2) return "";
  std::int64_t most = 0;
  double sent = 0;
  for (int daemon = 0; daemon < flags.daemons; ++daemon) {
    most = std::max(most, BuddyBytes(flags, plan, daemon));
    sent = std::max(sent, BuddyBytesPerStep(flags, plan, daemon));
  }
  return absl::StrFormat(
      "buddies with gradients of %d steps: at most %s of host memory on a daemon beside the above, "
      "%s to its buddy in a step on average\n",
      flags.buddy_steps, FormatBytes(most), FormatBytes(static_cast<std::int64_t>(sent)));
}

std::string PlanText(const PlanFlags& flags, const Routing& routing, const Plan& plan, bool color) {
  std::string text = absl::StrFormat(
      "%s on %s of %s: %s by Muon, %s by AdamW; %s, plan %s\n\n", flags.model,
      Counted(flags.daemons, "daemon"), Counted(flags.devices, "device"),
      Counted(routing.muon_parameters, "parameter"), Counted(routing.adamw_parameters, "parameter"),
      Counted(plan.shards.size(), "shard"), plan.hash);
  text += LoadTable(flags, plan, color);
  text += absl::StrFormat(
      "\nNewton-Schulz %s TFLOP a step, %s for each owner on average\n"
      "largest load %s TFLOP: %.4f of the floor that whole matrices allow (%s), which is %.4f of "
      "the mean\n",
      FormatNumber(plan.total_flops / 1e12), FormatNumber(plan.MeanFlops() / 1e12),
      FormatNumber(plan.largest_flops / 1e12), plan.imbalance_over_floor,
      FormatNumber(plan.floor_flops / 1e12),
      plan.total_flops == 0 ? 1 : plan.floor_flops / plan.MeanFlops());
  text += absl::StrFormat("splitting matrices would %s: %s\n",
                          plan.split.helps ? "help" : "not help", plan.split.reason);
  text += BuddyText(flags, plan);
  return text;
}

}  // namespace

VerbBody AttachPlan(CLI::App& command) {
  auto flags = std::make_shared<PlanFlags>();
  AddFlags(command, *flags);
  return [flags](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const RunSpec run, LoadRun(*flags));
    MUOND_ASSIGN_OR_RETURN(const Routing routing, RouteParameters(run));
    PlanOptions options;
    options.devices_per_daemon.assign(static_cast<std::size_t>(flags->daemons), flags->devices);
    options.memory_max_bytes = flags->memory_max;
    options.overlap = flags->overlap;
    options.device_memory = flags->backend == "cuda";
    options.iterate_bytes = options.device_memory ? 2 : 4;
    MachineRates rates;
    if (!flags->machine.empty()) {
      MUOND_ASSIGN_OR_RETURN(rates, LoadMachine(flags->machine));
      if (flags->link_gbps > 0) rates.link_gbps = flags->link_gbps;
    }
    MUOND_ASSIGN_OR_RETURN(const Plan plan, MakePlan(run, routing, options));
    std::optional<StepTime> time;
    if (!flags->machine.empty()) {
      MUOND_ASSIGN_OR_RETURN(
          time, EstimateStepTime(run, routing, plan, options.iterate_bytes, rates));
    }
    if (context.output == Output::kJson) {
      Json json = PlanJson(*flags, routing, plan);
      if (time) json["step_time"] = StepTimeJson(rates, *time);
      context.out << JsonText(json);
    } else {
      context.out << PlanText(*flags, routing, plan, context.color);
      if (time) context.out << StepTimeText(rates, *time);
    }
    return kOk;
  };
}

}  // namespace muond::cli
