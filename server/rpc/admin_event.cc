#include "proto/convert.h"
#include "server/rpc/admin_service.h"

namespace muond {
namespace {

void Fill(const std::vector<NamedValue>& values,
          google::protobuf::RepeatedPtrField<v1::Remarkable>* messages) {
  for (const NamedValue& value : values) {
    v1::Remarkable* message = messages->Add();
    message->set_parameter(value.parameter);
    message->set_value(value.value);
  }
}

}  // namespace

v1::StepEvent ToProto(const StepEvent& event) {
  v1::StepEvent message;
  message.set_run(event.run);
  message.set_daemon(event.daemon);
  *message.mutable_outcome() = ToProto(event.outcome);
  message.set_begin_seconds(event.begin_seconds);
  message.set_end_seconds(event.end_seconds);
  for (const PhaseSpan& span : event.phases) {
    v1::PhaseSpan* phase = message.add_phases();
    phase->set_phase(span.phase);
    phase->set_device(span.device);
    phase->set_start_seconds(span.start_seconds);
    phase->set_seconds(span.seconds);
  }
  message.set_scale_change(event.scale_change);
  message.set_sampled(event.sampled);
  Fill(event.worst_residuals, message.mutable_worst_residuals());
  Fill(event.worst_update_ratios, message.mutable_worst_update_ratios());
  Fill(event.largest_gradients, message.mutable_largest_gradients());
  message.set_stale_tensors(event.stale_tensors);
  for (const auto& [group, rate] : event.learning_rates) {
    (*message.mutable_learning_rates())[group] = rate;
  }
  return message;
}

}  // namespace muond
