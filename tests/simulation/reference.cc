#include "tests/simulation/reference.h"

#include <variant>

#include "proto/check.h"

namespace muond::simulation {

Reference::Reference(const Scenario& scenario, std::int64_t lineage, std::int64_t first_step)
    : scenario_(scenario),
      lineage_(lineage),
      layout_(scenario.model.WholeLayout()),
      machine_(layout_, scenario.spec, {.generation = lineage, .next_step = first_step}),
      engine_(scenario, -1, lineage) {
  states_[first_step] = engine_.state();
}

void Reference::Carry(const Effects& effects) {
  for (const Effect& effect : effects) {
    Effects next;
    if (const auto* reduce = std::get_if<ReduceEffect>(&effect)) {
      const auto facts = engine_.Reduce(*reduce, machine_.next_step());
      MUOND_CHECK(facts.ok(), facts.status().ToString());
      machine_.OnReduced(reduce->attempt, reduce->state, *facts, next);
    } else if (const auto* commit = std::get_if<CommitEffect>(&effect)) {
      consumed_[commit->step].commit = *commit;
      engine_.Commit(*commit);
      machine_.OnCommitted({}, next);
    } else if (const auto* outcome = std::get_if<OutcomeEffect>(&effect)) {
      consumed_[outcome->outcome.step].outcome = outcome->outcome;
    }
    Carry(next);
  }
}

void Reference::Skip(SkipCause cause) {
  for (std::int64_t rank = 0; rank < layout_.world_size; ++rank) {
    Effects effects;
    const std::int64_t step = machine_.next_step();
    const double told = scenario_.LossScale(lineage_, step, machine_.scaler().scale());
    machine_.OnSkip(rank, lineage_, step, cause, told, static_cast<std::uint64_t>(rank), effects);
    Carry(effects);
  }
}

void Reference::TrainByGradients(const std::vector<Content>& contents) {
  const std::int64_t step = machine_.next_step();
  const StepBegin begin = scenario_.BeginOf(lineage_, step, machine_.scaler().scale());
  for (std::int64_t rank = 0; rank < layout_.world_size; ++rank) {
    const Content& content = contents[rank];
    Effects effects;
    const absl::Status begun = machine_.OnBegin(rank, lineage_, begin, effects);
    MUOND_CHECK(begun.ok(), begun.ToString());
    for (int p = 0; p < static_cast<int>(layout_.parameters.size()); ++p) {
      const auto& slices = layout_.parameters[p].slices_of_rank;
      if (slices.empty() || scenario_.Absent(p, rank, step, content)) continue;
      for (SliceId id{p, rank, 0, 0}; id.slice < slices[rank]; ++id.slice) {
        for (id.micro_batch = 0; id.micro_batch < begin.micro_batches; ++id.micro_batch) {
          engine_.Store(id, content);
          const auto arrival = machine_.OnSlice(id, lineage_, step, DigestOf(id, content), effects);
          MUOND_CHECK(arrival.ok(), arrival.status().ToString());
        }
      }
    }
    machine_.OnFinish(rank, lineage_, step, scenario_.AbsentOf(rank, step, content),
                      static_cast<std::uint64_t>(rank), effects);
    Carry(effects);
  }
}

const Reference::Consumed& Reference::Train(const std::vector<Content>& contents) {
  const std::int64_t step = machine_.next_step();
  const auto skip = scenario_.SkipOf(lineage_, step);
  skip ? Skip(*skip) : TrainByGradients(contents);
  MUOND_CHECK(machine_.next_step() == step + 1, "nothing is missing where nothing is lost");
  engine_.Discard();
  states_[step + 1] = engine_.state();
  return consumed_.at(step);
}

const Reference::Consumed* Reference::Of(std::int64_t step) const {
  const auto found = consumed_.find(step);
  return found == consumed_.end() ? nullptr : &found->second;
}

const ToyState* Reference::StateAt(std::int64_t version) const {
  const auto found = states_.find(version);
  return found == states_.end() ? nullptr : &found->second;
}

}  // namespace muond::simulation
