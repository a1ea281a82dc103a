#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/route_to_work.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/dispatch/detail/cluster.cuh>
#include <penstock/dispatch/permutation.cuh>
#include <penstock/dispatch/routing.cuh>

/// Logits to the sorted work list in one launch. The blocks of one cluster share the tokens; a warp routes a token and notes, in the
/// block's shared memory, who visits each expert: one bit a token. Each block sends its notes to the others, counts the visitors of all
/// and so knows where its own pairs go. Bits are in the order of the tokens, so the list is sorted whatever the order in which they were
/// noted. Nothing is kept between launches.

namespace penstock::inline v0_1 {

/// How one launch of `route_to_work` shares the tokens: `blocks` blocks take `tokens_each` tokens each, with `warps` warps that route a
/// token at a time. No blocks: route and permute one after the other.
struct route_to_work_shape {
    static constexpr std::uint32_t most_blocks = detail::portable_cluster;
    static constexpr std::uint32_t most_warps = 16;
    static constexpr std::uint32_t most_tokens_each = 32;  ///< bits of a word

    std::uint32_t blocks = 0;
    std::uint32_t warps = 0;
    std::uint32_t tokens_each = 0;
};

/// Chooses that shape. A selector is a stateless type with this call operator; `detail::run_route_to_work` takes another one as a template
/// argument.
///
/// This one: up to eight tokens stay in one block, where no other block has to be waited for; every further doubling doubles the blocks
/// until the cluster is full, since a multiprocessor gives its full rate to one or two warps on each of its four schedulers; a full
/// cluster takes up to 32 tokens a block, 256 in all, and beyond that the machine's other multiprocessors are worth a second launch. At
/// least eight warps, and one for every 32 experts if that is more, count the visitors.
struct route_to_work_selector {
    /// @param cluster blocks that may run as one cluster: 1 where the architecture has no clusters
    PENSTOCK_HD constexpr route_to_work_shape operator()(std::uint32_t tokens, std::uint32_t experts,
                                                         std::uint32_t cluster) const noexcept {
        constexpr std::uint32_t together = 8;
        using shape = route_to_work_shape;
        std::uint32_t blocks = 1;
        while (blocks * together < tokens && 2 * blocks <= smaller(cluster, shape::most_blocks)) {
            blocks *= 2;
        }
        const auto each = static_cast<std::uint32_t>(ceil_div(tokens, blocks));
        if (tokens == 0 || each > shape::most_tokens_each) {
            return {};
        }
        const std::uint32_t wanted = larger(larger(each, together), static_cast<std::uint32_t>(ceil_div(experts, 32)));
        return {blocks, smaller(wanted, shape::most_warps), each};
    }
};

namespace detail {

/// The sum of `mine` over the threads before this one, and of all. @param totals a word for each warp of the block, at most 32. Threads
/// synchronise inside; before `totals` is used again they have to synchronise.
__device__ inline std::uint32_t sum_of_threads_before(std::uint32_t mine, std::uint32_t* totals, std::uint32_t& all) {
    const std::uint32_t warp = threadIdx.x / 32;
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t up_to_here = sum_up_to_lane(mine);
    if (lane == 31) {
        totals[warp] = up_to_here;
    }
    __syncthreads();
    const std::uint32_t total = lane < blockDim.x / 32 ? totals[lane] : 0;
    all = __reduce_add_sync(whole_warp, total);
    return __reduce_add_sync(whole_warp, lane < warp ? total : 0) + up_to_here - mine;
}

/// The grid is one block or one cluster. Dynamic shared memory: what the router of each warp needs.
template <int PerLane>
__global__ __launch_bounds__(route_to_work_shape::most_warps * 32, 1)
    __attribute__((visibility("hidden"))) void route_tokens_to_work(const __grid_constant__ routing_rule rule, const float* correction_bias,
                                                                    const float* logits, std::uint32_t tokens, std::uint32_t tokens_each,
                                                                    const std::int32_t* live, std::int32_t* ids, float* weights,
                                                                    std::int32_t* rows, std::uint32_t* offsets) {
    using shape = route_to_work_shape;
    using router_type = warp_router<PerLane>;
    struct chosen_pair {
        std::uint16_t token;  ///< of this block's
        std::int16_t expert;
    };
    // Bit t of visitors[b][e]: token t of block b visits expert e.
    __shared__ alignas(16) std::uint32_t visitors[shape::most_blocks][max_experts];
    __shared__ std::uint32_t places[max_experts];  // where this block's pairs of the expert go
    __shared__ chosen_pair chosen[shape::most_tokens_each * max_top_k];
    __shared__ float chosen_weights[shape::most_tokens_each * max_top_k];
    __shared__ std::uint32_t totals[shape::most_warps];
    __shared__ shared_inbox inbox;
    extern __shared__ float penstock_route_scratch[];

    const std::uint32_t warp = __shfl_sync(whole_warp, threadIdx.x / 32, 0);  // tells the compiler that a warp stays together
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t warps = blockDim.x / 32;
    const std::uint32_t blocks = gridDim.x;
    const std::uint32_t first = blockIdx.x * tokens_each;
    const std::uint32_t count = first < tokens ? smaller(tokens_each, tokens - first) : 0;
    const auto quads = static_cast<std::uint32_t>(ceil_div(rule.experts, 4));
    std::uint32_t* mine = visitors[blockIdx.x];

    // The first token's logits are on their way while the block clears its words.
    const router_type router(rule, correction_bias, penstock_route_scratch + warp * router_type::scratch_floats(rule.experts));
    typename router_type::token_logits held{};
    if (warp < count) {
        held = router.load(logits + static_cast<std::uint64_t>(first + warp) * rule.experts);
    }
    const std::int64_t alive = live != nullptr ? *live : std::int64_t{tokens};
    for (std::uint32_t q = threadIdx.x; q < quads; q += blockDim.x) {
        reinterpret_cast<uint4*>(mine)[q] = uint4{0, 0, 0, 0};
    }
    if (blocks > 1) {
        if (threadIdx.x == 0) {
            inbox.open((blocks - 1) * quads * static_cast<std::uint32_t>(sizeof(uint4)));
        }
        cluster_arrive();
    }
    __syncthreads();

    for (std::uint32_t t = warp; t < count; t += warps) {
        const lane_choice choice = choose_or_nobody(router, held, std::int64_t{first + t} < alive);
        if (lane < rule.top_k) {
            if (choice.id >= 0) {
                atomicOr(&mine[choice.id], 1u << t);
            }
            chosen[t * rule.top_k + lane] = {static_cast<std::uint16_t>(t), static_cast<std::int16_t>(choice.id)};
            chosen_weights[t * rule.top_k + lane] = choice.weight;
        }
        if (t + warps < count) {
            held = router.load(logits + static_cast<std::uint64_t>(first + t + warps) * rule.experts);
        }
    }
    if (blocks > 1) {
        cluster_wait();  // every inbox is open
    }
    __syncthreads();
    if (blocks > 1) {
        for (std::uint32_t b = warp; b < blocks; b += warps) {
            for (std::uint32_t q = lane; q < quads && b != blockIdx.x; q += 32) {
                const uint4* from = reinterpret_cast<const uint4*>(mine) + q;
                inbox.send(b, from, *from);
            }
        }
        inbox.wait();
    }

    std::uint32_t before_experts = 0;
    for (std::uint32_t e0 = 0; e0 < rule.experts; e0 += blockDim.x) {
        const std::uint32_t e = e0 + threadIdx.x;
        std::uint32_t all_blocks = 0;
        std::uint32_t earlier_blocks = 0;
        if (e < rule.experts) {
            for (std::uint32_t b = 0; b < blocks; ++b) {
                const auto n = static_cast<std::uint32_t>(__popc(visitors[b][e]));
                all_blocks += n;
                earlier_blocks += b < blockIdx.x ? n : 0;
            }
        }
        if (e0 > 0) {
            __syncthreads();  // the totals are used again
        }
        std::uint32_t of_these = 0;
        const std::uint32_t start = before_experts + sum_of_threads_before(all_blocks, totals, of_these);
        if (e < rule.experts) {
            places[e] = start + earlier_blocks;
            if (blockIdx.x == 0) {
                offsets[e] = start;
            }
        }
        before_experts += of_these;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        offsets[rule.experts] = before_experts;
    }
    __syncthreads();
    for (std::uint32_t p = threadIdx.x; p < count * rule.top_k; p += blockDim.x) {
        const chosen_pair pair = chosen[p];
        const std::uint32_t number = first * rule.top_k + p;
        ids[number] = pair.expert;
        weights[number] = chosen_weights[p];
        if (pair.expert >= 0) {
            const std::uint32_t earlier = mine[pair.expert] & ((1u << pair.token) - 1);
            rows[places[pair.expert] + static_cast<std::uint32_t>(__popc(earlier))] = static_cast<std::int32_t>(number);
        }
    }
}

/// The body of executor::cuda::route_to_work.
template <class Selector = route_to_work_selector>
void run_route_to_work(const routing_rule& rule, const router_ref& router, const float* logits, std::uint32_t tokens,
                       const std::int32_t* live, std::int32_t* ids, float* weights, std::int32_t* rows, std::uint32_t* offsets,
                       std::span<std::byte> scratch, std::size_t scratch_bytes, cudaStream_t stream) {
    validate(rule);
    if (scratch.size() < scratch_bytes) {
        throw configuration_error("penstock: route_to_work of " + std::to_string(tokens) + " tokens needs " +
                                  std::to_string(scratch_bytes) + " bytes of scratch, " + std::to_string(scratch.size()) + " were given");
    }
    visit_registers(rule, [&]<int PerLane>(std::integral_constant<int, PerLane>) {
        const auto kernel = route_tokens_to_work<PerLane>;
        const bool clusters = compiled_for_sm_90(reinterpret_cast<const void*>(kernel));
        const route_to_work_shape s = Selector{}(tokens, rule.experts, clusters ? route_to_work_shape::most_blocks : 1);
        if (s.blocks == 0) {
            run_route(rule, router, logits, tokens, live, ids, weights, stream);
            run_permute(ids, tokens * rule.top_k, rule.experts, rows, offsets, scratch, scratch_bytes, stream);
            return;
        }
        if (s.blocks > (clusters ? s.most_blocks : 1) || s.warps == 0 || s.warps > s.most_warps || s.tokens_each > s.most_tokens_each ||
            std::uint64_t{s.blocks} * s.tokens_each < tokens) {
            throw configuration_error("penstock: route_to_work: its selector chose " + std::to_string(s.blocks) + " blocks of " +
                                      std::to_string(s.warps) + " warps with " + std::to_string(s.tokens_each) + " tokens each for " +
                                      std::to_string(tokens) + " tokens");
        }
        launch_cluster(kernel, s.blocks, dim3(s.warps * 32),
                       std::size_t{s.warps} * warp_router<PerLane>::scratch_floats(rule.experts) * sizeof(float), stream, rule,
                       router.correction_bias, logits, tokens, s.tokens_each, live, ids, weights, rows, offsets);
    });
}

}  // namespace detail
}  // namespace penstock::inline v0_1
