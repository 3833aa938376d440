// muond-example-char-lm: trains a small language model on a text through a running daemon, once by
// Muon with AdamW and once by AdamW alone, and says who is ahead. Exit code 1: an error, or a Muon
// run that the daemon's own numbers do not prove.
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/examples/char_lm/comparison.h"
#include "client/examples/char_lm/progress.h"
#include "client/examples/char_lm/report.h"
#include "client/examples/char_lm/text/corpus.h"
#include "client/examples/char_lm/trainer.h"
#include "proto/check.h"

namespace muond::char_lm {
namespace {

struct Flags {
  std::string endpoint, text, out = ".", run = "char-lm";
  std::vector<std::string> held_out = {"Ruth", "Mark", "Rom"};
  // The same for both: Muon's updates are scaled to the size of AdamW's.
  std::vector<double> muon_lrs = {0.003, 0.006, 0.012, 0.024, 0.048};
  std::vector<double> adamw_lrs = {0.003, 0.006, 0.012, 0.024, 0.048};
  std::int64_t steps = 1500;
  std::int64_t sweep_steps = 300;
  bool keep = false;
  TrainSettings settings;
};

void AddFlags(CLI::App& app, Flags& flags) {
  app.add_option("--endpoint", flags.endpoint, "the daemon: unix:///path or host:port")
      ->envname("MUOND_ENDPOINT")
      ->required();
  app.add_option("--text", flags.text, "verses, one a line: bible -p /usr/lib -f gen1:1-rev22:21")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--out", flags.out, "folder for summary.json and loss.csv")->capture_default_str();
  app.add_option("--run", flags.run, "beginning of the runs' names")->capture_default_str();
  app.add_option("--holdout", flags.held_out, "books for validation")
      ->delimiter(',')
      ->capture_default_str();
  const auto rates = [&app](const char* name, std::vector<double>& values, const char* what) {
    app.add_option(name, values, what)
        ->delimiter(',')
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
  };
  rates("--muon-lr", flags.muon_lrs, "learning rates of Muon's sweep; one: no sweep");
  rates("--adamw-lr", flags.adamw_lrs, "likewise AdamW's, as many");
  const auto count = [&app](const char* name, std::int64_t& value, const char* what) {
    app.add_option(name, value, what)->check(CLI::Range(1, 1'000'000))->capture_default_str();
  };
  count("--steps", flags.steps, "steps of each of the two runs");
  count("--sweep-steps", flags.sweep_steps, "steps of each run of the sweep");
  count("--batch", flags.settings.batch, "examples a step");
  count("--context", flags.settings.shape.context, "characters that the model looks at");
  count("--width", flags.settings.shape.width, "of an embedding");
  count("--hidden", flags.settings.shape.hidden, "width of the two hidden layers");
  count("--scale-window", flags.settings.loss_scale_window,
        "good steps before the loss scale doubles");
  app.add_option("--seed", flags.settings.seed)->capture_default_str();
  app.add_flag("--keep", flags.keep, "leave the two runs open in the daemon, to be looked at");
}

absl::StatusOr<TrainResult> TrainWithProgress(const Corpus& corpus, const Flags& flags,
                                              const TrainJob& job) {
  client::SessionOptions options;
  options.endpoint = flags.endpoint;
  Progress progress(job.run + ":", job.steps, stdout);
  return Train(corpus, flags.settings, job, options,
               [&](std::int64_t step, double loss, double scale) {
                 progress.Update(step, absl::StrFormat("train loss %.3f, loss scale %.0f", loss,
                                                       scale));
               });
}

// Short runs, one for each learning rate of the optimizer. Muon's trains embedding, lm_head and
// biases with the learning rate that AdamW alone was best with.
absl::StatusOr<double> Sweep(const Corpus& corpus, const Flags& flags, TrainJob job,
                             std::vector<Candidate>& candidates) {
  const bool muon = job.optimizer == Optimizer::kMuon;
  const char* name = OptimizerName(job.optimizer);
  const std::vector<double>& rates = muon ? flags.muon_lrs : flags.adamw_lrs;
  if (rates.size() == 1) return rates[0];
  job.steps = job.validation_every = flags.sweep_steps;
  for (const double lr : rates) {
    (muon ? job.muon_lr : job.adamw_lr) = lr;
    job.run = absl::StrFormat("%s-sweep-%s-%d", flags.run, name, candidates.size());
    MUOND_ASSIGN_OR_RETURN(const TrainResult result, TrainWithProgress(corpus, flags, job));
    candidates.push_back({lr, result.final_loss()});
    absl::PrintF("sweep %-5s lr %-7g validation loss %.4f after %d steps\n", name, lr,
                 result.final_loss(), job.steps);
  }
  const int best = BestCandidate(candidates);
  if (best < 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("sweep of %s: no learning rate has a finite loss", name));
  }
  const bool edge = best == 0 || best + 1 == static_cast<int>(candidates.size());
  absl::PrintF("sweep %-5s takes lr %g%s\n", name, candidates[best].lr,
               edge ? " (an end of the sweep: a wider one might find better)" : "");
  return candidates[best].lr;
}

absl::Status Run(Flags& flags) {
  if (flags.muon_lrs.size() != flags.adamw_lrs.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "sweep: %d learning rates of muon and %d of adamw; a fair comparison has as many of both",
        flags.muon_lrs.size(), flags.adamw_lrs.size()));
  }
  MUOND_ASSIGN_OR_RETURN(const Corpus corpus, ReadCorpus(flags.text, flags.held_out));
  TrainSettings& settings = flags.settings;
  settings.shape.vocabulary = static_cast<std::int64_t>(corpus.vocabulary.size());
  absl::PrintF("text: %d verses, %d different characters; %d characters of %d books for training, "
               "%d of %s for validation\n",
               corpus.verses, corpus.vocabulary.size(), corpus.train.size(),
               corpus.train_books.size(), corpus.validation.size(),
               absl::StrJoin(corpus.validation_books, ", "));
  if (std::min(corpus.train.size(), corpus.validation.size()) <=
      static_cast<std::size_t>(settings.shape.context)) {
    return absl::InvalidArgumentError("text: a side of the split is shorter than the context");
  }
  settings.initial_loss_scale =
      FindOverflowingScale(corpus, settings, settings.initial_loss_scale);
  absl::PrintF("loss scale: begins with %.0f, the smallest power of two from 65536 on at which the "
               "first step overflows\n",
               settings.initial_loss_scale);

  Report report{.corpus = &corpus, .text_path = flags.text, .settings = settings};
  TrainJob job{.optimizer = Optimizer::kAdamW};
  MUOND_ASSIGN_OR_RETURN(report.adamw_lr, Sweep(corpus, flags, job, report.adamw_sweep));
  job = {.optimizer = Optimizer::kMuon, .adamw_lr = report.adamw_lr};
  MUOND_ASSIGN_OR_RETURN(report.muon_lr, Sweep(corpus, flags, job, report.muon_sweep));

  job = {.run = flags.run + "-muon",
         .optimizer = Optimizer::kMuon,
         .muon_lr = report.muon_lr,
         .adamw_lr = report.adamw_lr,
         .steps = flags.steps,
         .validation_every = std::max<std::int64_t>(flags.steps / 40, 1),
         .keep_open = flags.keep};
  MUOND_ASSIGN_OR_RETURN(report.muon, TrainWithProgress(corpus, flags, job));
  job.run = flags.run + "-adamw";
  job.optimizer = Optimizer::kAdamW;
  MUOND_ASSIGN_OR_RETURN(report.adamw, TrainWithProgress(corpus, flags, job));
  absl::PrintF("%s", Table(report));
  MUOND_RETURN_IF_ERROR(WriteFiles(report, flags.out));
  absl::PrintF("%s/summary.json and %s/loss.csv written\n", flags.out, flags.out);
  return CheckMuonRun(report.muon);
}

}  // namespace
}  // namespace muond::char_lm

int main(int argc, char** argv) {
  muond::char_lm::Flags flags;
  CLI::App app("Trains a character-level language model through a muond daemon.");
  muond::char_lm::AddFlags(app, flags);
  CLI11_PARSE(app, argc, argv);
  ::mkdir(flags.out.c_str(), 0777);  // there already is fine; what is not writable is told later
  const absl::Status status = muond::char_lm::Run(flags);
  if (status.ok()) return 0;
  absl::FPrintF(stderr, "muond-example-char-lm: %s\n", status.message());
  return 1;
}
