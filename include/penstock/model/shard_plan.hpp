#pragma once

#include <penstock/error.hpp>
#include <penstock/model/moe_model.hpp>
#include <penstock/model/tensor_slice.hpp>
#include <penstock/units.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// Which GPU holds what of a model's experts: plain data, made before a byte moves.

namespace penstock::inline v0_1 {

/// What was measured of each expert, [layer][expert], layers in the order of moe_model::layers: tokens, or anything that grows with the work.
using expert_loads = std::vector<std::vector<double>>;

/// How experts are dealt out to GPUs.
namespace placement {

/// Runs of neighbours, the larger ones first: 30 experts on 8 GPUs are 4,4,4,4,4,4,3,3.
struct contiguous {};

/// Expert e to GPU e mod gpus.
struct round_robin {};

/// Heaviest first, each to the GPU with the least load so far (then the one with fewer experts, then the lower number): greedy longest
/// processing time. Loads become even; how many experts a GPU holds may not.
struct by_load {
    expert_loads loads;
};

}  // namespace placement

/// Who owns which experts of which layer. Layers are counted as in moe_model::layers, experts by their global id, GPUs from 0: positions in
/// the list of places that the plan is used with, not device numbers.
class shard_plan {
public:
    /// Whole experts. A GPU may own none where experts are few. @throws configuration_error for no GPUs; loads that do not fit the model
    [[nodiscard]] static shard_plan by_expert(const moe_model& model, std::uint32_t gpus, placement::contiguous = {}) {
        shard_plan plan(model, gpus, "by expert, contiguous");
        for (layer_plan& l : plan.layers_) {
            for (std::uint32_t g = 0; g < gpus; ++g) {
                const index_range own = share_of(l.experts(), gpus, g);
                for (std::uint64_t e = own.first; e < own.end(); ++e) {
                    l.owners[e] = {g};
                }
            }
        }
        plan.list_experts();
        return plan;
    }

    [[nodiscard]] static shard_plan by_expert(const moe_model& model, std::uint32_t gpus, placement::round_robin) {
        shard_plan plan(model, gpus, "by expert, round robin");
        for (layer_plan& l : plan.layers_) {
            for (std::uint32_t e = 0; e < l.experts(); ++e) {
                l.owners[e] = {e % gpus};
            }
        }
        plan.list_experts();
        return plan;
    }

    [[nodiscard]] static shard_plan by_expert(const moe_model& model, std::uint32_t gpus, const placement::by_load& measured) {
        shard_plan plan(model, gpus, "by expert, by load");
        plan.set_loads(measured.loads);
        for (layer_plan& l : plan.layers_) {
            std::vector<double> load(gpus, 0);
            std::vector<std::uint32_t> held(gpus, 0);
            for (const std::uint32_t e : l.hottest_first()) {
                std::uint32_t to = 0;
                for (std::uint32_t g = 1; g < gpus; ++g) {
                    to = std::pair(load[g], held[g]) < std::pair(load[to], held[to]) ? g : to;
                }
                l.owners[e] = {to};
                load[to] += l.loads[e];
                ++held[to];
            }
        }
        plan.list_experts();
        return plan;
    }

    /// Every GPU has a slice of every expert: a range of its intermediate dimension (rows of gate and up, columns of down), sizes differing by
    /// at most a unit. `unit` 0: 32 where 32 weights share a scale or a word (mxfp4, int4), else 16.
    /// @throws configuration_error for no GPUs
    [[nodiscard]] static shard_plan by_slice(const moe_model& model, std::uint32_t gpus, std::uint32_t unit = 0) {
        shard_plan plan(model, gpus, "by slice");
        std::vector<std::uint32_t> all(gpus);
        std::iota(all.begin(), all.end(), 0u);
        for (std::size_t i = 0; i < plan.layers_.size(); ++i) {
            layer_plan& l = plan.layers_[i];
            const weight_kind kind = model.layers[i].layout.kind;
            const std::uint32_t step = unit > 0 ? unit : kind == weight_kind::mxfp4 || kind == weight_kind::int4_group ? 32 : 16;
            for (std::uint32_t g = 0; g < gpus; ++g) {
                l.slices.push_back(share_of(model.layers[i].intermediate, gpus, g, step));
            }
            std::fill(l.owners.begin(), l.owners.end(), all);
        }
        plan.sliced_ = true;
        plan.list_experts();
        return plan;
    }

    /// The same plan with copies of the `hottest` experts of each layer on further GPUs, so that each has `copies` owners in all (0: every
    /// GPU). Hottest first, each copy to the GPU with the least load that lacks it; an expert's owners share its load evenly.
    /// @throws configuration_error for a plan by slice; loads that do not fit
    [[nodiscard]] shard_plan replicate(std::uint32_t hottest, const expert_loads& loads, std::uint32_t copies = 0) const {
        shard_plan plan = *this;
        plan.set_loads(loads);
        plan.add_copies(hottest, copies);
        return plan;
    }

    /// The same by the loads that the plan was made with. @throws configuration_error for a plan made without
    [[nodiscard]] shard_plan replicate(std::uint32_t hottest) const {
        if (!measured_) {
            throw configuration_error(
                "penstock: which experts are hot? This shard_plan was made without measured loads: pass them to replicate()");
        }
        shard_plan plan = *this;
        plan.add_copies(hottest, 0);
        return plan;
    }

    [[nodiscard]] std::uint32_t gpus() const noexcept { return gpus_; }
    [[nodiscard]] std::uint32_t layers() const noexcept { return static_cast<std::uint32_t>(layers_.size()); }
    [[nodiscard]] std::uint32_t experts(std::uint32_t layer) const { return at(layer).experts(); }
    [[nodiscard]] bool sliced() const noexcept { return sliced_; }  ///< made by by_slice()

    /// The GPUs that hold an expert, at least one: the first is its home, further ones are replicas.
    /// @throws configuration_error for a layer or expert that is not there, as all members do: an id is never dropped
    [[nodiscard]] std::span<const std::uint32_t> owners(std::uint32_t layer, std::uint32_t expert) const {
        const layer_plan& l = at(layer);
        require(expert < l.experts(), "expert", expert, l.experts());
        return l.owners[expert];
    }

    [[nodiscard]] std::uint32_t owner(std::uint32_t layer, std::uint32_t expert) const { return owners(layer, expert).front(); }

    /// Global ids of a GPU's experts, ascending, replicas among them.
    [[nodiscard]] std::span<const std::uint32_t> experts_of(std::uint32_t layer, std::uint32_t gpu) const {
        const layer_plan& l = at(layer);
        require(gpu < gpus_, "GPU", gpu, gpus_);
        return l.held[gpu];
    }

    /// Position of an expert in experts_of(layer, gpu): its local id there. Nothing where that GPU does not hold it.
    [[nodiscard]] std::optional<std::uint32_t> local_index(std::uint32_t layer, std::uint32_t expert, std::uint32_t gpu) const {
        static_cast<void>(owners(layer, expert));
        const std::span<const std::uint32_t> held = experts_of(layer, gpu);
        const auto it = std::lower_bound(held.begin(), held.end(), expert);
        return it != held.end() && *it == expert ? std::optional(static_cast<std::uint32_t>(it - held.begin())) : std::nullopt;
    }

    /// The part of the intermediate dimension that a GPU has of its experts: all of it unless sliced().
    [[nodiscard]] index_range slice_of(std::uint32_t layer, std::uint32_t gpu) const {
        const layer_plan& l = at(layer);
        require(gpu < gpus_, "GPU", gpu, gpus_);
        return sliced_ ? l.slices[gpu] : index_range{0, l.intermediate};
    }

    /// Load of a GPU in one layer, by the measured loads, or with a load of 1 for each expert.
    [[nodiscard]] double load(std::uint32_t layer, std::uint32_t gpu) const {
        const layer_plan& l = at(layer);
        double sum = 0;
        for (const std::uint32_t e : experts_of(layer, gpu)) {
            const double part = !sliced_             ? 1.0 / static_cast<double>(l.owners[e].size())
                                : l.intermediate > 0 ? static_cast<double>(l.slices[gpu].count) / static_cast<double>(l.intermediate)
                                                     : 0.0;
            sum += l.loads[e] * part;
        }
        return sum;
    }

    /// Load of the busiest GPU over the mean: 1 is even, gpus() is all on one; 1 for a layer without load.
    [[nodiscard]] double imbalance(std::uint32_t layer) const {
        double most = 0, sum = 0;
        for (std::uint32_t g = 0; g < gpus_; ++g) {
            const double one = load(layer, g);
            most = larger(most, one);
            sum += one;
        }
        return sum > 0 ? most * gpus_ / sum : 1;
    }

    /// Bytes of the records that a GPU holds, without the gaps of their alignment; of a plan by slice in proportion.
    [[nodiscard]] std::uint64_t bytes(std::uint32_t gpu) const {
        std::uint64_t sum = 0;
        for (std::uint32_t i = 0; i < layers(); ++i) {
            const layer_plan& l = layers_[i];
            const std::uint64_t all = l.record_bytes * experts_of(i, gpu).size();
            sum += !sliced_             ? all
                   : l.intermediate > 0 ? static_cast<std::uint64_t>(static_cast<double>(all) * static_cast<double>(l.slices[gpu].count) /
                                                                     static_cast<double>(l.intermediate))
                                        : 0;
        }
        return sum;
    }

    /// A line for each GPU (experts over all layers, bytes, share of the load), then the imbalance.
    friend std::ostream& operator<<(std::ostream& out, const shard_plan& plan) {
        char line[160];
        double total = 0, worst = 1, sum = 0;
        std::vector<double> loads(plan.gpus_, 0);
        for (std::uint32_t i = 0; i < plan.layers(); ++i) {
            for (std::uint32_t g = 0; g < plan.gpus_; ++g) {
                loads[g] += plan.load(i, g);
                total += plan.load(i, g);
            }
            worst = larger(worst, plan.imbalance(i));
            sum += plan.imbalance(i);
        }
        out << "shard plan " << plan.how_ << ": " << plan.layers() << " layers over " << plan.gpus_ << " GPUs\n";
        for (std::uint32_t g = 0; g < plan.gpus_; ++g) {
            std::uint64_t held = 0;
            for (std::uint32_t i = 0; i < plan.layers(); ++i) {
                held += plan.experts_of(i, g).size();
            }
            std::snprintf(line, sizeof line, "GPU %-3u %8llu experts%s  %12s  %5.1f %% of the load\n", g,
                          static_cast<unsigned long long>(held), plan.sliced_ ? " (a slice of each)" : "",
                          to_string(penstock::bytes{plan.bytes(g)}).c_str(), total > 0 ? loads[g] / total * 100 : 0.0);
            out << line;
        }
        std::snprintf(line, sizeof line, "imbalance (busiest GPU over the mean, %s): %.3f in the mean of the layers, %.3f at worst\n",
                      plan.measured_ ? "measured loads" : "equal loads", plan.layers() > 0 ? sum / plan.layers() : 1.0, worst);
        return out << line;
    }

private:
    struct layer_plan {
        std::uint64_t intermediate = 0;
        std::uint64_t record_bytes = 0;
        std::vector<double> loads;                       ///< by expert
        std::vector<std::vector<std::uint32_t>> owners;  ///< by expert: its home, then replicas
        std::vector<std::vector<std::uint32_t>> held;    ///< by GPU: experts, ascending
        std::vector<index_range> slices;                 ///< by GPU; empty unless sliced

        [[nodiscard]] std::uint32_t experts() const noexcept { return static_cast<std::uint32_t>(owners.size()); }

        /// Ties to the lower id.
        [[nodiscard]] std::vector<std::uint32_t> hottest_first() const {
            std::vector<std::uint32_t> order(owners.size());
            std::iota(order.begin(), order.end(), 0u);
            std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return loads[a] > loads[b]; });
            return order;
        }
    };

    shard_plan(const moe_model& model, std::uint32_t gpus, const char* how) : gpus_(gpus), how_(how) {
        if (gpus == 0) {
            throw configuration_error("penstock: a shard_plan for 0 GPUs was asked for");
        }
        for (const moe_layer_model& m : model.layers) {
            layer_plan& l = layers_.emplace_back();
            l.intermediate = m.intermediate;
            l.record_bytes = m.layout.bytes;
            l.loads.assign(m.experts.size(), 1.0);
            l.owners.resize(m.experts.size());
        }
    }

    static void require(bool there, const char* what, std::uint64_t asked, std::uint64_t count) {
        if (!there) {
            throw configuration_error(std::string("penstock: shard_plan was asked for ") + what + " " + std::to_string(asked) +
                                      ", it has " + std::to_string(count));
        }
    }

    [[nodiscard]] const layer_plan& at(std::uint32_t layer) const {
        require(layer < layers_.size(), "layer", layer, layers_.size());
        return layers_[layer];
    }

    void set_loads(const expert_loads& loads) {
        if (loads.size() != layers_.size()) {
            throw configuration_error("penstock: loads of " + std::to_string(loads.size()) + " layers were given, the model has " +
                                      std::to_string(layers_.size()));
        }
        for (std::size_t i = 0; i < loads.size(); ++i) {
            if (loads[i].size() != layers_[i].owners.size()) {
                throw configuration_error("penstock: layer " + std::to_string(i) + ": loads of " + std::to_string(loads[i].size()) +
                                          " experts were given, it has " + std::to_string(layers_[i].owners.size()));
            }
            for (std::size_t e = 0; e < loads[i].size(); ++e) {
                if (!std::isfinite(loads[i][e]) || loads[i][e] < 0) {
                    throw configuration_error("penstock: layer " + std::to_string(i) + ", expert " + std::to_string(e) + ": a load of " +
                                              std::to_string(loads[i][e]) + " was given");
                }
            }
            layers_[i].loads = loads[i];
        }
        measured_ = true;
    }

    void add_copies(std::uint32_t hottest, std::uint32_t copies) {
        if (sliced_) {
            throw configuration_error(
                "penstock: a shard_plan by slice has a part of every expert on every GPU: there is nothing to replicate");
        }
        const std::size_t wanted = copies == 0 ? gpus_ : smaller(copies, gpus_);
        for (std::uint32_t i = 0; i < layers(); ++i) {
            layer_plan& l = layers_[i];
            std::vector<double> load(gpus_, 0);
            for (std::uint32_t g = 0; g < gpus_; ++g) {
                load[g] = this->load(i, g);
            }
            std::vector<std::uint32_t> order = l.hottest_first();
            order.resize(smaller<std::size_t>(order.size(), hottest));
            for (const std::uint32_t e : order) {
                std::vector<std::uint32_t>& own = l.owners[e];
                while (own.size() < wanted) {
                    std::uint32_t to = gpus_;
                    for (std::uint32_t g = 0; g < gpus_; ++g) {
                        const bool lacks = std::find(own.begin(), own.end(), g) == own.end();
                        to = lacks && (to == gpus_ || load[g] < load[to]) ? g : to;
                    }
                    const double before = l.loads[e] / static_cast<double>(own.size());
                    const double after = l.loads[e] / static_cast<double>(own.size() + 1);
                    for (const std::uint32_t g : own) {
                        load[g] += after - before;
                    }
                    own.push_back(to);
                    load[to] += after;
                }
            }
        }
        how_ += ", hot experts replicated";
        list_experts();
    }

    /// `held` from `owners`.
    void list_experts() {
        for (layer_plan& l : layers_) {
            l.held.assign(gpus_, {});
            for (std::uint32_t e = 0; e < l.experts(); ++e) {
                for (const std::uint32_t g : l.owners[e]) {
                    l.held[g].push_back(e);
                }
            }
        }
    }

    std::uint32_t gpus_;
    std::string how_;
    bool sliced_ = false;
    bool measured_ = false;
    std::vector<layer_plan> layers_;
};

}  // namespace penstock::inline v0_1
