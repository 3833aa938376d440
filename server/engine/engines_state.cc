// Whole state out and in again, on all devices.
#include <chrono>
#include <utility>

#include "proto/check.h"
#include "server/engine/engines_post.h"

namespace muond {

std::shared_ptr<StateCopies> Engines::MakeStateCopies() const {
  auto copies = std::make_shared<StateCopies>();
  for (const auto& unit : units_) copies->push_back(unit->engine->MakeStateCopy());
  return copies;
}

void Engines::CopyState(std::shared_ptr<StateCopies> copies, Done done) {
  PostTo<absl::Status>(
      All(),
      [copies = std::move(copies)](Engine& engine) {
        StateCopy& copy = (*copies)[engine.place()];
        const auto start = std::chrono::steady_clock::now();
        absl::Status status = engine.CopyState(copy);
        copy.seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        return status;
      },
      [done = std::move(done)](std::vector<absl::Status> statuses) { done(First(statuses)); });
}

void Engines::CopyGradient(int state, char* out, Done done) {
  CloseBatches();
  const Box whole = WholeBox(shapes_[state]);
  PostTo<absl::Status>(
      UnitsOf(state, whole, {0, whole.Elements()}),
      [state, out](Engine& engine) { return engine.CopyGradient(state, out); },
      [done = std::move(done)](std::vector<absl::Status> statuses) { done(First(statuses)); });
}

void Engines::RestoreState(std::shared_ptr<const StateCopies> copies,
                           std::function<void(const absl::StatusOr<StateHealth>&)> done) {
  CloseBatches();
  PostTo<absl::StatusOr<StateHealth>>(
      All(),
      [copies = std::move(copies)](Engine& engine) -> absl::StatusOr<StateHealth> {
        MUOND_RETURN_IF_ERROR(engine.RestoreState((*copies)[engine.place()]));
        return engine.Health();
      },
      [done = std::move(done)](std::vector<absl::StatusOr<StateHealth>> parts) {
        if (const absl::Status status = First(parts); !status.ok()) return done(status);
        StateHealth whole;
        for (const auto& part : parts) Merge(*part, whole);
        done(whole);
      });
}

}  // namespace muond
