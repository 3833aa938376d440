#include "server/daemon/logging.h"

#include <memory>
#include <mutex>
#include <utility>

#include "nlohmann/json.hpp"
#include "proto/steady_time.h"
#include "server/daemon/log_filter.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

// The message as a JSON string: quotes, control characters and bad UTF-8 are escaped or replaced.
// Behind it what it is about.
class JsonMessage final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    const std::string message_text(message.payload.data(), message.payload.size());
    std::string text = Quoted(message_text);
    const LogFields fields = LogFieldsOf(message_text);
    if (!fields.run.empty()) text += ",\"run\":" + Quoted(fields.run);
    if (fields.step) text += ",\"step\":" + std::to_string(*fields.step);
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<JsonMessage>();
  }

 private:
  static std::string Quoted(const std::string& text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
};

// Filters, counts, and passes on to stderr.
class LimitedSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  void SetListener(std::function<void(std::string_view)> listener) {
    std::lock_guard lock(mutex_);
    listener_ = std::move(listener);
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    const auto text =
        filter_.Admit({message.payload.data(), message.payload.size()}, SteadyNow());
    if (!text) return;
    spdlog::details::log_msg written = message;
    written.payload = *text;
    stderr_.log(written);
    const auto level = spdlog::level::to_string_view(message.level);
    if (listener_ != nullptr) listener_({level.data(), level.size()});
  }
  void flush_() override { stderr_.flush(); }
  void set_pattern_(const std::string& pattern) override { stderr_.set_pattern(pattern); }
  void set_formatter_(std::unique_ptr<spdlog::formatter> formatter) override {
    stderr_.set_formatter(std::move(formatter));
  }

 private:
  // By mutex_, which is spdlog's: it holds it for the methods above.
  LogFilter filter_;
  std::function<void(std::string_view)> listener_;
  spdlog::sinks::stderr_sink_mt stderr_;
};

std::shared_ptr<LimitedSink> the_sink;

}  // namespace

void SetUpLogging(const std::string& level, const std::string& format) {
  the_sink = std::make_shared<LimitedSink>();
  auto logger = std::make_shared<spdlog::logger>("muond", the_sink);
  if (format == "json") {
    auto formatter = std::make_unique<spdlog::pattern_formatter>();
    formatter->add_flag<JsonMessage>('*').set_pattern(
        R"({"ts":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l","msg":%*})");
    logger->set_formatter(std::move(formatter));
  } else {
    logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %-8l %v");
  }
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

void SetLogListener(std::function<void(std::string_view level)> listener) {
  if (the_sink != nullptr) the_sink->SetListener(std::move(listener));
}

}  // namespace muond
