// What is left of a comparison: the table at the end, summary.json and loss.csv.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/examples/char_lm/comparison.h"
#include "client/examples/char_lm/text/corpus.h"
#include "client/examples/char_lm/trainer.h"
#include "nlohmann/json.hpp"

namespace muond::char_lm {

struct Report {
  const Corpus* corpus = nullptr;
  std::string text_path;
  TrainSettings settings;
  std::vector<Candidate> muon_sweep, adamw_sweep;
  double muon_lr = 0, adamw_lr = 0;  // the muon run uses both
  TrainResult muon, adamw;
};

// "131072 x1, 65536 x200, 131072 x12": runs of equal values.
std::string CompressScales(std::span<const double> scales);

// The keys that deploy/quickstart and its readers rely on, and some more.
nlohmann::json Summary(const Report& report);

// optimizer,step,train_loss,validation_loss: what plot_loss.py draws.
std::string LossCsv(const Report& report);

// For people, ends with a newline.
std::string Table(const Report& report);

// summary.json and loss.csv in an existing directory. UNAVAILABLE naming what cannot be written.
absl::Status WriteFiles(const Report& report, const std::string& directory);

}  // namespace muond::char_lm
