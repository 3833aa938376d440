// A link that loses, repeats, shortens and damages what it carries, on each path: nothing wrong is
// ever applied or given out, and a trainer that tries again gets there.
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/admin.h"
#include "client/cpp/session.h"
#include "gtest/gtest.h"
#include "proto/channel.h"
#include "proto/steady_time.h"
#include "tests/conformance/tampering_proxy.h"
#include "tests/conformance/transport_paths.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {
namespace {

using cluster::Floats;
using cluster::Must;

constexpr std::int64_t kElements = 160 * 160;  // two windows, several chunks

// Changes of a message, whichever way its chunk's bytes go.
template <typename Message>
v1::Chunk* FirstChunk(Message& message) {
  return message.has_fill() ? message.mutable_fill()->mutable_chunks(0) : message.mutable_chunk();
}

template <typename Message>
std::vector<Message> Drop(const Message&) {
  return {};
}
template <typename Message>
std::vector<Message> Twice(const Message& message) {
  return {message, message};
}
template <typename Message>
std::vector<Message> Shorten(const Message& message) {
  Message changed = message;
  v1::Chunk* chunk = FirstChunk(changed);
  if (changed.has_fill()) {
    chunk->mutable_region()->set_bytes(chunk->region().bytes() - 4);
  } else {
    chunk->mutable_data()->resize(chunk->data().size() - 4);
  }
  return {changed};
}
// A bit of the bytes; of an arena, whose memory is out of reach here, of their checksum.
template <typename Message>
std::vector<Message> Damage(const Message& message) {
  Message changed = message;
  v1::Chunk* chunk = FirstChunk(changed);
  if (changed.has_fill()) {
    chunk->set_crc32c(chunk->crc32c() ^ 1);
  } else {
    (*chunk->mutable_data())[5] ^= 1;
  }
  return {changed};
}

// Does it to the n-th message only; n < 0: to all.
template <typename Message>
std::function<std::vector<Message>(const Message&)> Once(
    int n, std::function<std::vector<Message>(const Message&)> change) {
  return [n, seen = 0, change](const Message& message) mutable {
    const bool now = n < 0 || seen++ == n;
    return now ? change(message) : std::vector{message};
  };
}

class TransportFaultTest : public testing::TestWithParam<Path> {
 protected:
  TransportFaultTest() : initial_(cluster::Noise(kElements, 1)) {
    client::SessionOptions options = daemon_.OptionsFor(GetParam());
    options.channel = nullptr;
    options.endpoint = proxy_.endpoint();
    options.transport = GetParam() == Path::kArena ? "arena" : "grpc";
    options.chunk_bytes = 16 * 1024;
    options.step_timeout = absl::Seconds(3);
    session_ = Must(client::Session::Open(spec_, 0, cluster::CutOf(spec_, {}, 0), options));
    const client::SliceSource source = SourceOf(initial_);
    Must(session_->Initialize({&source, 1}));
  }

  static client::SliceSource SourceOf(const Floats& values) {
    return {.parameter = "w", .data = values.data(), .elements = kElements};
  }
  std::shared_ptr<grpc::Channel> DaemonChannel() {
    if (GetParam() == Path::kInProcess) return daemon_.service().channel();
    const std::string target = GetParam() == Path::kGrpcTcp
                                   ? daemon_.service().addresses()[1]
                                   : "unix:" + daemon_.unix_address().substr(7);
    return MakeChannel(target, std::int64_t{64} << 20);
  }
  absl::Status Push(const Floats& gradient) {
    const client::SliceSource source = SourceOf(gradient);
    return session_->Push({&source, 1});
  }
  // Into a buffer that holds nothing sensible.
  absl::StatusOr<Floats> Pull(std::int64_t version) {
    Floats pulled(kElements, std::nanf("1"));
    const client::SliceSink sink{.parameter = "w", .data = pulled.data(), .elements = kElements};
    if (absl::Status status = session_->Pull(version, {&sink, 1}); !status.ok()) return status;
    return pulled;
  }
  static std::string Digest(Service& service) {
    return Must(client::Admin(service.channel(), absl::Seconds(30)).Digest("run"))
        .tensor_digest();
  }

  PathDaemon daemon_;
  TamperingProxy proxy_{DaemonChannel()};
  const RunSpec spec_ = cluster::SpecOf({cluster::Matrix("w", 160, 160)});
  const Floats initial_;
  std::unique_ptr<client::Session> session_;
};

TEST_P(TransportFaultTest, WhateverALinkDoesToAPushTheStepIsTheOneThatWasMeant) {
  using Change = std::function<std::vector<v1::PushRequest>(const v1::PushRequest&)>;
  const std::pair<const char*, Change> faults[] = {{"drop", Drop<v1::PushRequest>},
                                                   {"twice", Twice<v1::PushRequest>},
                                                   {"shorten", Shorten<v1::PushRequest>},
                                                   {"damage", Damage<v1::PushRequest>}};
  std::uint64_t seed = 10;
  for (const auto& [name, change] : faults) {
    for (const int which : {0, 1, 2}) {
      SCOPED_TRACE(std::string(name) + " message " + std::to_string(which));
      const Floats gradient = cluster::Noise(kElements, ++seed);
      Must(session_->Begin({}));
      proxy_.TamperPush(Once<v1::PushRequest>(which, change));
      const absl::Status first = Push(gradient);
      proxy_.TamperPush(nullptr);
      if (!first.ok()) {
        EXPECT_TRUE(absl::IsDataLoss(first) || absl::IsInvalidArgument(first) ||
                    absl::IsFailedPrecondition(first) || absl::IsNotFound(first))
            << first;
        EXPECT_TRUE(Push(gradient).ok());
      }
      EXPECT_TRUE(Must(session_->Finish()).applied);
    }
  }
  const std::string digest = Digest(daemon_.service());

  PathDaemon other;
  const auto undisturbed = Must(client::Session::Open(spec_, 0, cluster::CutOf(spec_, {}, 0),
                                                      other.OptionsFor(Path::kInProcess)));
  const client::SliceSource values = SourceOf(initial_);
  Must(undisturbed->Initialize({&values, 1}));
  for (std::uint64_t s = 11; s <= seed; ++s) {
    const Floats gradient = cluster::Noise(kElements, s);
    const client::SliceSource source = SourceOf(gradient);
    Must(undisturbed->Step({}, {&source, 1}));
  }
  EXPECT_EQ(Digest(other.service()), digest);
}

TEST_P(TransportFaultTest, ALinkThatDamagesEverythingIsDataLoss) {
  const Floats gradient = cluster::Noise(kElements, 5);
  Must(session_->Begin({}));
  proxy_.TamperPush(Damage<v1::PushRequest>);
  EXPECT_EQ(Push(gradient).code(), absl::StatusCode::kDataLoss);
  proxy_.TamperPush(nullptr);
  Must(Push(gradient));
  const StepOutcome outcome = Must(session_->Finish());
  proxy_.TamperPull(Damage<v1::PullReply>);
  EXPECT_EQ(Pull(outcome.version).status().code(), absl::StatusCode::kDataLoss);
  proxy_.TamperPull(nullptr);
  EXPECT_TRUE(Pull(outcome.version).ok());
}

TEST_P(TransportFaultTest, WhatALinkDoesToAPullOnceIsMended) {
  using Change = std::function<std::vector<v1::PullReply>(const v1::PullReply&)>;
  const Change changes[] = {Drop<v1::PullReply>, Twice<v1::PullReply>, Shorten<v1::PullReply>,
                            Damage<v1::PullReply>};
  for (const Change& change : changes) {
    proxy_.TamperPull(Once<v1::PullReply>(0, change));
    const auto pulled = Pull(0);
    ASSERT_TRUE(pulled.ok()) << pulled.status();
    EXPECT_EQ(*pulled, initial_);
  }
}

TEST_P(TransportFaultTest, ADaemonThatSaysYesAndTakesNothingIsFoundOut) {
  Must(session_->Begin({}));
  const std::string before = Digest(daemon_.service());
  proxy_.SwallowPushes(true);
  const Floats gradient = cluster::Noise(kElements, 5);
  EXPECT_TRUE(Push(gradient).ok());
  proxy_.SwallowPushes(false);
  const auto outcome = session_->Finish();
  EXPECT_EQ(outcome.status().code(), absl::StatusCode::kDeadlineExceeded) << outcome.status();
  EXPECT_EQ(Digest(daemon_.service()), before);
  Must(Push(gradient));
  EXPECT_TRUE(Must(session_->Finish()).applied);
}

TEST_P(TransportFaultTest, ADaemonThatSaysYesAndGivesNothingIsFoundOut) {
  proxy_.TamperPull(Drop<v1::PullReply>);
  EXPECT_EQ(Pull(0).status().code(), absl::StatusCode::kDataLoss);
}

// More than the windows hold: the trainer waits for fences that never move.
TEST(ArenaDeadlineTest, APushWhoseWindowsNobodyDrainsEndsWithItsDeadline) {
  PathDaemon daemon;
  TamperingProxy proxy(daemon.service().channel());
  client::SessionOptions options = daemon.OptionsFor(Path::kArena);
  options.endpoint = proxy.endpoint();
  options.bulk_timeout = absl::Seconds(2);
  const RunSpec spec = cluster::SpecOf({cluster::Matrix("w", 512, 512)});
  const auto session =
      Must(client::Session::Open(spec, 0, cluster::CutOf(spec, {}, 0), options));
  const Floats values = cluster::Noise(512 * 512, 1);
  const client::SliceSource source{.parameter = "w", .data = values.data(), .elements = 512 * 512};
  Must(session->Initialize({&source, 1}));
  Must(session->Begin({}));
  proxy.SwallowPushes(true);
  const absl::Time start = SteadyNow();
  EXPECT_EQ(session->Push({&source, 1}).code(), absl::StatusCode::kDeadlineExceeded);
  const absl::Duration waited = SteadyNow() - start;
  EXPECT_GE(waited, absl::Seconds(1));
  EXPECT_LT(waited, absl::Seconds(20));
  // The windows are the trainer's again.
  proxy.SwallowPushes(false);
  Must(session->Push({&source, 1}));
  EXPECT_TRUE(Must(session->Finish()).applied);
}

INSTANTIATE_TEST_SUITE_P(Paths, TransportFaultTest, testing::ValuesIn(kAllPaths),
                         [](const auto& test) { return PathName(test.param); });

}  // namespace
}  // namespace muond::conformance
