#include "server/registry/routing.h"

#include <array>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "re2/re2.h"

namespace muond {
namespace {

// Substrings of lower-cased names that mean AdamW where no role was declared.
constexpr std::array<const char*, 3> kNameFallbacks = {"embed", "lm_head", "router"};

// Names in a message, as many as a gRPC status can carry.
std::string Join(const std::vector<std::string>& names) {
  constexpr std::size_t kBytesMax = 2048;
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (text.size() > kBytesMax) return absl::StrCat(text, " and ", names.size() - i, " more");
    absl::StrAppend(&text, i == 0 ? "\"" : ", \"", names[i], "\"");
  }
  return text;
}

absl::Status Refuse(const std::string& name, const std::string& cause) {
  return absl::InvalidArgumentError(absl::StrFormat("parameter \"%s\": %s", name, cause));
}

bool HasMatrices(Kind kind) {
  return kind == Kind::kMatrix || kind == Kind::kExperts || kind == Kind::kConv;
}

// The elements of a declared shape that can be meant.
absl::StatusOr<std::int64_t> DeclaredElements(const ParameterSpec& spec) {
  if (!spec.shape.has_value()) {
    return Refuse(spec.name,
                  "shape is missing, as that of a partitioned placeholder is: send the layer's "
                  "logical shape (ds_shape under ZeRO-3, the global shape of a DTensor)");
  }
  absl::StatusOr<std::int64_t> elements = ElementCount(*spec.shape);
  if (!elements.ok()) return Refuse(spec.name, std::string(elements.status().message()));
  if (*elements == 0 && !spec.allow_empty) {
    return Refuse(spec.name,
                  absl::StrFormat("shape %s has no elements: a partitioned placeholder (ZeRO-3 "
                                  "zero.Init shows shape (0,)): send the layer's shape (ds_shape), "
                                  "or allow_empty for a tensor that is meant to be empty",
                                  DimsToString(*spec.shape)));
  }
  return elements;
}

struct Decision {
  Algorithm algorithm = Algorithm::kAdamW;
  std::string reason;
  bool degenerate = false;  // a hidden matrix whose views all have one row or column
};

// What an `auto` group does with a parameter when neither exclusion nor rule speaks.
Decision DecideByRole(const ParameterSpec& spec, Kind kind,
                      const std::vector<MatrixBlock>& matrices) {
  const bool declared = spec.role != Role::kUnspecified;
  if (declared && spec.role != Role::kHidden) {
    return {Algorithm::kAdamW, absl::StrFormat("%s by role", RoleName(spec.role))};
  }
  if (!HasMatrices(kind)) return {Algorithm::kAdamW, absl::StrFormat("%s", KindName(kind))};
  if (!declared) {
    const std::string lower = absl::AsciiStrToLower(spec.name);
    for (const char* part : kNameFallbacks) {
      if (absl::StrContains(lower, part)) {
        return {Algorithm::kAdamW, absl::StrFormat("name contains \"%s\"", part)};
      }
    }
  }
  if (Degenerate(matrices)) {
    return {Algorithm::kAdamW,
            absl::StrFormat("degenerate matrix (%d x %d)", matrices[0].rows, matrices[0].cols),
            true};
  }
  const char* what = kind == Kind::kMatrix    ? "matrix"
                     : kind == Kind::kExperts ? "expert stack"
                                              : "convolution";
  return {Algorithm::kMuon, declared ? absl::StrFormat("hidden %s", what)
                                     : absl::StrFormat("%s without a role, taken as hidden", what)};
}

class Router {
 public:
  explicit Router(const RunSpec& run) : run_(run) {}

  absl::StatusOr<Routing> Route() {
    MUOND_RETURN_IF_ERROR(IndexGroups());
    MUOND_RETURN_IF_ERROR(CompileRules());
    std::unordered_set<std::string> seen;
    for (const ParameterSpec& spec : run_.parameters) {
      if (!seen.insert(spec.name).second) {
        return absl::AlreadyExistsError(
            absl::StrFormat("parameter \"%s\": the name is registered twice", spec.name));
      }
      MUOND_RETURN_IF_ERROR(RouteOne(spec));
    }
    MUOND_RETURN_IF_ERROR(CheckCollected());
    MUOND_RETURN_IF_ERROR(CheckRules());
    MUOND_RETURN_IF_ERROR(CheckGroups());
    MUOND_RETURN_IF_ERROR(Tie());
    Count();
    return std::move(routing_);
  }

 private:
  // Row ranges of all matrices together; a mixture of experts of a trillion parameters has 100,000.
  static constexpr std::int64_t kRunRowRangesMax = 4 * kRowRangesMax;
  // Every parameter is held against every rule.
  static constexpr std::size_t kRulesMax = 256;

  struct Rule {
    std::unique_ptr<RE2> pattern;
    bool won = false;   // decided for some parameter
    bool muon = false;  // a parameter that it matches is on Muon, or has no elements
  };

  absl::Status IndexGroups() {
    for (const GroupSpec& group : run_.groups) {
      if (!groups_.emplace(group.name, &group).second) {
        return absl::AlreadyExistsError(
            absl::StrFormat("group \"%s\": the name is registered twice", group.name));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CompileRules() {
    if (run_.rules.size() > kRulesMax) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("%d routing rules, at most %d are served", run_.rules.size(), kRulesMax));
    }
    RE2::Options options;
    options.set_log_errors(false);
    options.set_max_mem(1 << 20);
    for (const RoutingRule& rule : run_.rules) {
      rules_.push_back({std::make_unique<RE2>(rule.pattern, options)});
      if (!rules_.back().pattern->ok()) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "routing rule \"%s\": bad pattern: %s", rule.pattern, rules_.back().pattern->error()));
      }
    }
    return absl::OkStatus();
  }

  absl::Status RouteOne(const ParameterSpec& spec) {
    MUOND_ASSIGN_OR_RETURN(const std::int64_t elements, DeclaredElements(spec));
    MUOND_ASSIGN_OR_RETURN(const Kind kind, ResolveKind(spec.name, *spec.shape, spec.kind));
    if (!HasMatrices(kind) && !spec.split.sizes.empty()) {
      return Refuse(spec.name, absl::StrFormat("split of a %s: only the rows of a matrix are split",
                                               KindName(kind)));
    }
    const auto group = groups_.find(spec.group);
    if (group == groups_.end()) {
      return Refuse(spec.name, absl::StrFormat("group \"%s\" is not one of the run's", spec.group));
    }
    if (elements > 0) used_groups_.insert(spec.group);
    if (elements > 0 && spec.exclude && group->second->algorithm == Algorithm::kMuon) {
      return Refuse(spec.name, absl::StrFormat(
                                   "exclude conflicts with algorithm muon of group \"%s\": move it "
                                   "to a group of algorithm auto or adamw",
                                   spec.group));
    }
    std::vector<MatrixBlock> matrices;
    if (HasMatrices(kind) && !spec.exclude && group->second->algorithm != Algorithm::kAdamW) {
      MUOND_ASSIGN_OR_RETURN(matrices, MatrixBlocks(spec.name, *spec.shape, kind, spec.split));
    }
    const Decision decision = Decide(spec, *group->second, kind, elements, matrices);
    RoutedParameter routed{spec.name, decision.algorithm, decision.reason, {}, elements, 0};
    routed.state = static_cast<int>(routing_.parameters.size());
    if (decision.algorithm == Algorithm::kMuon) {
      for (const MatrixBlock& block : matrices) {
        row_ranges_ += static_cast<std::int64_t>(block.ranges.size());
      }
      if (row_ranges_ > kRunRowRangesMax) {
        return absl::ResourceExhaustedError(absl::StrFormat(
            "parameter \"%s\": the run has more than %d matrices to orthogonalize or parts of them",
            spec.name, kRunRowRangesMax));
      }
      routed.matrices = std::move(matrices);
    }
    routing_.parameters.push_back(std::move(routed));
    return absl::OkStatus();
  }

  Decision Decide(const ParameterSpec& spec, const GroupSpec& group, Kind kind,
                  std::int64_t elements, const std::vector<MatrixBlock>& matrices) {
    if (elements == 0) {
      if (group.algorithm == Algorithm::kAuto) WinningRule(spec.name);
      return {Algorithm::kAdamW, "no elements"};
    }
    switch (group.algorithm) {
      case Algorithm::kAdamW:
        return {Algorithm::kAdamW, "group algorithm adamw"};
      case Algorithm::kMuon:
        return DecideMuon(spec, kind, "group algorithm muon");
      case Algorithm::kAuto:
        break;
    }
    if (spec.exclude) return {Algorithm::kAdamW, "excluded by the trainer"};
    Decision by_role = DecideByRole(spec, kind, matrices);
    matrix_seen_ = matrix_seen_ || HasMatrices(kind);
    if (spec.role == Role::kHidden && !HasMatrices(kind)) flat_.push_back(spec.name);
    // A split into single rows takes a matrix from Muon that is none too small for it.
    const bool hidden = by_role.algorithm == Algorithm::kMuon ||
                        (by_role.degenerate && !spec.split.sizes.empty());
    const int rule = WinningRule(spec.name);
    if (rule < 0 || run_.rules[rule].algorithm == Algorithm::kAuto) {
      if (hidden && by_role.algorithm != Algorithm::kMuon) inactive_.push_back(spec.name);
      return by_role;
    }
    const std::string reason = absl::StrFormat("rule \"%s\"", run_.rules[rule].pattern);
    if (run_.rules[rule].algorithm == Algorithm::kMuon) {
      rules_[rule].muon = true;
      return DecideMuon(spec, kind, reason);
    }
    if (hidden) inactive_.push_back(spec.name);
    return {Algorithm::kAdamW, reason};
  }

  // Muon on explicit request: also for degenerate matrices, never for what is no matrix.
  Decision DecideMuon(const ParameterSpec& spec, Kind kind, const std::string& reason) {
    if (HasMatrices(kind)) return {Algorithm::kMuon, reason};
    no_matrices_.push_back(spec.name);
    return {Algorithm::kAdamW, reason};
  }

  // Index of the first rule that matches, which is marked; -1 when none does.
  int WinningRule(const std::string& name) {
    for (std::size_t i = 0; i < rules_.size(); ++i) {
      if (RE2::FullMatch(name, *rules_[i].pattern)) {
        rules_[i].won = true;
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  absl::Status CheckCollected() const {
    if (!no_matrices_.empty()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "parameters %s: Muon was asked for by group or rule, but these have no matrix view: move "
          "them to a group of algorithm auto or adamw, or narrow the rule",
          Join(no_matrices_)));
    }
    if (!inactive_.empty()) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "parameters %s: a routing rule sends these hidden matrices to AdamW, or a split into "
          "single rows does: Muon would be silently inactive; add a muon rule for them, or set "
          "exclude on them or use a group of algorithm adamw if AdamW is meant",
          Join(inactive_)));
    }
    if (!flat_.empty() && !matrix_seen_) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "parameters %s: role hidden, but no matrix is among the run's parameters: Muon would be "
          "silently inactive; send the layers' logical shapes, not those of flattened shards",
          Join(flat_)));
    }
    return absl::OkStatus();
  }

  absl::Status CheckRules() {
    for (std::size_t i = 0; i < rules_.size(); ++i) {
      if (!rules_[i].won) routing_.unmatched_rules.push_back(run_.rules[i].pattern);
      if (run_.rules[i].algorithm == Algorithm::kMuon && !rules_[i].muon && !Redundant(i)) {
        return absl::FailedPreconditionError(absl::StrFormat(
            "routing rule \"%s\" asks for Muon, but sends no parameter of an auto group there: "
            "Muon would be silently inactive; the pattern is matched against the whole name",
            run_.rules[i].pattern));
      }
    }
    return absl::OkStatus();
  }

  // A muon rule that only matches what an earlier rule sent to Muon already does no harm.
  bool Redundant(std::size_t rule) const {
    for (std::size_t p = 0; p < routing_.parameters.size(); ++p) {
      const RoutedParameter& routed = routing_.parameters[p];
      if (routed.algorithm == Algorithm::kMuon &&
          groups_.at(run_.parameters[p].group)->algorithm == Algorithm::kAuto &&
          RE2::FullMatch(routed.name, *rules_[rule].pattern)) {
        return true;
      }
    }
    return false;
  }

  absl::Status CheckGroups() const {
    for (const GroupSpec& group : run_.groups) {
      if (group.algorithm == Algorithm::kMuon && used_groups_.count(group.name) == 0) {
        return absl::FailedPreconditionError(absl::StrFormat(
            "group \"%s\" asks for Muon, but no parameter with elements is in it: Muon "
            "would be silently inactive; assign parameters to it or leave it out",
            group.name));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Tie() {
    std::unordered_map<std::string, int> first_of_tie;
    for (std::size_t i = 0; i < routing_.parameters.size(); ++i) {
      if (run_.parameters[i].tie.empty()) continue;
      const auto [entry, inserted] =
          first_of_tie.emplace(run_.parameters[i].tie, static_cast<int>(i));
      if (inserted) continue;
      MUOND_RETURN_IF_ERROR(CheckTied(entry->second, static_cast<int>(i)));
      routing_.parameters[i].state = entry->second;
    }
    return absl::OkStatus();
  }

  absl::Status CheckTied(int first, int other) const {
    const ParameterSpec& a = run_.parameters[first];
    const ParameterSpec& b = run_.parameters[other];
    const RoutedParameter& to_a = routing_.parameters[first];
    const RoutedParameter& to_b = routing_.parameters[other];
    const auto conflict = [&](const char* what, const std::string& one, const std::string& two) {
      return absl::AlreadyExistsError(
          absl::StrFormat("parameter \"%s\": tied to \"%s\" as \"%s\", which have one state: %s %s "
                          "conflicts with %s",
                          b.name, a.name, a.tie, what, two, one));
    };
    if (a.shape != b.shape)
      return conflict("shape", DimsToString(*a.shape), DimsToString(*b.shape));
    if (a.dtype != b.dtype) {
      return conflict("dtype", std::string(kernels::DtypeName(a.dtype)),
                      std::string(kernels::DtypeName(b.dtype)));
    }
    if (to_a.algorithm != to_b.algorithm) {
      return conflict("algorithm",
                      absl::StrFormat("%s (%s)", AlgorithmName(to_a.algorithm), to_a.reason),
                      absl::StrFormat("%s (%s)", AlgorithmName(to_b.algorithm), to_b.reason));
    }
    if (a.group != b.group) {
      return conflict("group", absl::StrFormat("\"%s\"", a.group),
                      absl::StrFormat("\"%s\"", b.group));
    }
    if (to_a.matrices != to_b.matrices) {
      return conflict("kind and split", DescribeView(a), DescribeView(b));
    }
    if (a.tie_reduction != b.tie_reduction) {
      const bool sum = a.tie_reduction == TieReduction::kSum;
      return conflict("tie_reduction", sum ? "sum" : "same", sum ? "same" : "sum");
    }
    if (a.replicated != b.replicated) {
      return conflict("replicated", a.replicated ? "true" : "false",
                      b.replicated ? "true" : "false");
    }
    return absl::OkStatus();
  }

  static std::string DescribeView(const ParameterSpec& spec) {
    return absl::StrFormat(
        "%s %d x %s%s%s", KindName(spec.kind), spec.split.groups, DimsToString(spec.split.sizes),
        spec.split.interleaved ? " interleaved" : "", spec.split.per_head ? " per head" : "");
  }

  void Count() {
    for (std::size_t i = 0; i < routing_.parameters.size(); ++i) {
      const RoutedParameter& routed = routing_.parameters[i];
      if (routed.state != static_cast<int>(i)) continue;
      if (routed.algorithm == Algorithm::kMuon) {
        ++routing_.muon_parameters;
        routing_.muon_matrices += static_cast<std::int64_t>(routed.matrices.size());
      } else {
        ++routing_.adamw_parameters;
      }
    }
  }

  const RunSpec& run_;
  std::unordered_map<std::string, const GroupSpec*> groups_;
  std::unordered_set<std::string> used_groups_;
  std::vector<Rule> rules_;
  std::vector<std::string> no_matrices_;
  std::vector<std::string> inactive_;
  std::vector<std::string> flat_;  // of role hidden, not matrices, in auto groups
  bool matrix_seen_ = false;       // in an auto group
  std::int64_t row_ranges_ = 0;
  Routing routing_;
};

}  // namespace

absl::StatusOr<Routing> RouteParameters(const RunSpec& run) { return Router(run).Route(); }

}  // namespace muond
