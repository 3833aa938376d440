// Runs to plan in tests: the shapes of real models and random ones, and what every plan must keep.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/registry/plan.h"
#include "server/registry/plan_cost.h"
#include "server/registry/run_for_test.h"

namespace muond {

inline RunSpec LlamaRun(int layers, std::int64_t width, std::int64_t kv, std::int64_t ffn,
                        std::int64_t vocabulary) {
  std::vector<ParameterSpec> list = {Tensor("embed", {vocabulary, width}, Role::kEmbedding)};
  for (int i = 0; i < layers; ++i) {
    const auto add = [&](const char* name, Dims shape) {
      list.push_back(Tensor(absl::StrFormat("layers.%d.%s", i, name), std::move(shape)));
    };
    add("attn_norm", {width});
    add("q", {width, width});
    add("k", {kv, width});
    add("v", {kv, width});
    add("o", {width, width});
    add("ffn_norm", {width});
    add("gate", {ffn, width});
    add("up", {ffn, width});
    add("down", {width, ffn});
  }
  return RunOf(std::move(list));
}
inline RunSpec Llama1B() { return LlamaRun(16, 2048, 512, 8192, 128256); }
inline RunSpec Llama7B() { return LlamaRun(32, 4096, 4096, 11008, 32000); }
inline RunSpec Llama70B() { return LlamaRun(80, 8192, 1024, 28672, 32000); }

inline PlanOptions Daemons(int daemons, int devices = 1) {
  return {.devices_per_daemon = std::vector<int>(static_cast<std::size_t>(daemons), devices)};
}

inline absl::StatusOr<Plan> PlanOf(const RunSpec& run, const PlanOptions& options) {
  const absl::StatusOr<Routing> routing = RouteParameters(run);
  if (!routing.ok()) return routing.status();
  return MakePlan(run, *routing, options);
}

// A run of matrices, stacks, splits, vectors, ties and empty tensors of random sizes, many of them
// on the borders of blocks and many beside.
inline RunSpec RandomRun(std::mt19937_64& random, int parameters) {
  const auto upto = [&random](std::int64_t end) {
    return std::uniform_int_distribution<std::int64_t>(0, end)(random);
  };
  const auto side = [&] { return upto(1) == 0 ? 256 * (1 + upto(3)) : 2 + upto(700); };
  std::vector<ParameterSpec> list;
  for (int i = 0; i < parameters; ++i) {
    const std::string name = absl::StrFormat("p%d", i);
    switch (upto(6)) {
      case 0:
        list.push_back(Tensor(name, {1 + upto(5000)}));
        break;
      case 1:
        list.push_back(Tensor(name, {side() * 20, side()}, Role::kEmbedding));
        break;
      case 2:
        list.push_back(Tensor(name, {2 + upto(12), side(), side()}, Role::kHidden, Kind::kExperts));
        break;
      case 3: {
        const std::int64_t head = 2 + upto(1) * 126;
        list.push_back(Tensor(name, {6 * head, side()}, Role::kHidden));
        list.back().split = {{head, head, head}, 2, upto(1) == 0, upto(1) == 0};
        break;
      }
      case 4:
        list.push_back(Tensor(name, {0, 4}));
        list.back().allow_empty = true;
        break;
      default:
        list.push_back(Tensor(name, {1 + side(), 1 + side()}, Role::kHidden));
    }
    const Dtype dtypes[] = {Dtype::kF32, Dtype::kBF16};
    list.back().dtype = dtypes[upto(1)];
    if (i > 0 && upto(9) == 0) {
      list.back().tie = name;
      list.push_back(list.back());
      list.back().name += ".tied";
    }
  }
  return RunOf(std::move(list));
}

// The promises of plan.h that hold for every plan.
inline void ExpectSound(const RunSpec& run, const PlanOptions& options, const Plan& plan) {
  const Routing routing = RouteParameters(run).value();
  constexpr auto kBlock = static_cast<std::int64_t>(kernels::kBlockElements);
  std::size_t listed = 0;
  std::vector<std::int64_t> elements(plan.owners.size(), 0), matrices(plan.owners.size(), 0);
  for (int p = 0; p < static_cast<int>(run.parameters.size()); ++p) {
    const RoutedParameter& routed = routing.parameters[p];
    const std::span<const Shard> shards = plan.ShardsOf(p);
    listed += shards.size();
    if (routed.state != p) {
      EXPECT_TRUE(shards.empty()) << "a tied name";
      continue;
    }
    ASSERT_FALSE(shards.empty());
    std::int64_t next = 0, inside = 0;
    for (const Shard& shard : shards) {
      ASSERT_EQ(shard.parameter, p);
      ASSERT_EQ(shard.first, next) << routed.name;
      ASSERT_TRUE(shard.owner >= 0 && shard.owner < static_cast<int>(plan.owners.size()));
      next += shard.elements;
      EXPECT_TRUE(shard.elements > 0 || routed.elements == 0);
      EXPECT_TRUE(next == routed.elements || next % kBlock == 0) << routed.name;
      elements[shard.owner] += shard.elements;
      std::int64_t in_matrices = 0;
      for (const MatrixBlock& block : MatricesIn(routed, shard)) {
        in_matrices += block.rows * block.cols;
        ++inside;
        ++matrices[shard.owner];
        for (const RowRange& range : block.ranges) {
          EXPECT_GE(range.begin, 0);
          EXPECT_LE((range.begin + range.count) * block.cols, shard.elements);
        }
      }
      EXPECT_EQ(in_matrices, routed.algorithm == Algorithm::kMuon ? shard.elements : 0);
    }
    EXPECT_EQ(next, routed.elements) << routed.name;
    EXPECT_EQ(inside, static_cast<std::int64_t>(routed.matrices.size())) << routed.name;
    for (std::size_t i = 1; i < shards.size(); ++i) {
      EXPECT_NE(shards[i].owner, shards[i - 1].owner) << "neighbours of one owner are one shard";
    }
  }
  EXPECT_EQ(listed, plan.shards.size());
  double flops = 0;
  for (std::size_t i = 0; i < plan.owners.size(); ++i) {
    EXPECT_EQ(plan.owners[i].elements, elements[i]);
    EXPECT_EQ(plan.owners[i].matrices, matrices[i]);
    EXPECT_LE(plan.owners[i].flops, plan.largest_flops);
    flops += plan.owners[i].flops;
    if (options.memory_max_bytes > 0) {
      EXPECT_LE(plan.owners[i].MemoryBytes(), options.memory_max_bytes);
    }
  }
  EXPECT_NEAR(flops, plan.total_flops, flops * 1e-9);
  EXPECT_GE(plan.imbalance_over_floor, 1);
  EXPECT_GE(plan.floor_flops, plan.MeanFlops() * (1 - 1e-9));
}

}  // namespace muond
