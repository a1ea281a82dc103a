/// penstock inside an engine that owns allocator, router and streams: the store, the dense weights and the workspace get its memory, the
/// layers its choices of experts. The model is a small one, written first. Runs on a GPU, or on the host.

#include "moe_stream/random_checkpoint.hpp"
#include "support/compare.hpp"
#include "support/mirrored.hpp"
#include "support/temporary_directory.hpp"
#include "support/with_store.hpp"

#include <iostream>
#include <random>
namespace ps = penstock;

namespace {

/// The engine's allocator: one slab, handed out front to back, 256-byte aligned.
class slab {
public:
    slab(std::uint64_t size, ps::place at) : memory_(size, at), left_{memory_.data(), size} {}
    std::span<std::byte> take(std::uint64_t size) {
        const std::span<std::byte> piece = left_.first(size);
        left_ = left_.subspan(ps::round_up(size, ps::placement_alignment));
        return piece;
    }

private:
    example::mirrored<std::byte> memory_;
    std::span<std::byte> left_;
};

/// The engine's router: token t visits experts t and t + 1, with weights of its own. One token is padding: -1 is nobody.
struct own_router {
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    own_router(std::uint32_t tokens, std::int32_t experts) {
        for (std::uint32_t t = 0; t < tokens; ++t) {
            const auto e = static_cast<std::int32_t>(t);
            const bool padding = t + 1 == tokens;
            ids.insert(ids.end(), {padding ? -1 : e % experts, padding ? -1 : (e + 1) % experts});
            weights.insert(weights.end(), {0.75f, 0.25f});
        }
    }
};

template <class Executor>
std::vector<float> serve(const ps::moe_model& model, ps::place at, std::uint64_t slots, const std::vector<float>& x,
                         const own_router& router) {
    using store_t = ps::expert_store<ps::scheduler::priority<3>>;
    using layers_t = ps::moe_layers<Executor, store_t>;
    const auto tokens = static_cast<std::uint32_t>(router.ids.size() / 2);
    const std::uint64_t slot_bytes = ps::round_up(model.record_bytes(), ps::placement_alignment);
    const std::uint64_t workspace = layers_t::workspace_bytes(model, tokens);
    const std::uint64_t dense = ps::dense_weights::bytes_needed(model);
    slab memory(slots * slot_bytes + workspace + dense + 3 * ps::placement_alignment, at);

    store_t store(model, {.device = {slots * slot_bytes}}, at, {.compute = memory.take(slots * slot_bytes), .host = {}});
    layers_t layers(store, {.max_tokens = tokens, .workspace = memory.take(workspace), .dense_memory = memory.take(dense)});
    example::mirrored<float> hidden(x.size(), at), output(x.size(), at), weights(router.weights.size(), at);
    example::mirrored<std::int32_t> ids(router.ids.size(), at);
    hidden.assign(x);
    ids.assign(router.ids);
    weights.assign(router.weights);
    const ps::activations in{hidden.data(), ps::dtype::f32, tokens, model.layers[0].hidden};
    const ps::activations_out out{output.data(), ps::dtype::f32, tokens, model.layers[0].hidden};
    if constexpr (Executor::on_device) {
        const ps::stream stream;  // the engine's: its attention kernels would be on it too
        layers[0].experts_async(in, {ids.data(), weights.data(), 2}, out, nullptr, stream.get());
        stream.synchronize();
    } else {
        layers[0].experts(in, {ids.data(), weights.data(), 2}, out);
    }
    std::cout << store.report();
    return output.fetch();
}

}  // namespace

int main() {
    return example::guarded("inside_engine", [] {
        const example::temporary_directory directory("penstock-inside-engine");
        example::write_random_checkpoint(directory.path, 1, 256, 128, 16, 4);
        const ps::moe_model model = ps::describe(ps::checkpoint::open(directory.path));
        const own_router router(8, 16);
        std::vector<float> x(8 * 256);
        std::mt19937 random(1);
        std::ranges::generate(x, [&] { return std::normal_distribution<float>()(random); });
        const std::vector<float> want = serve<ps::executor::host>(model, ps::on_host(), 16, x, router);
        std::vector<float> got = serve<ps::executor::host>(model, ps::on_host(), 2, x, router);
#ifdef PENSTOCK_EXAMPLE_HAS_CUDA
        if (ps::device_count() > 0) {
            got = serve<ps::executor::cuda<>>(model, ps::on_device(0), 2, x, router);
        }
#endif
        const double error = example::largest_error(got, want, x.size());
        const bool padding_is_zero = std::all_of(got.end() - 256, got.end(), [](float v) { return v == 0; });
        std::printf("relative error against all experts resident on the host: %.1e\n", error);
        return error < 1e-5 && padding_is_zero ? 0 : 1;
    });
}
