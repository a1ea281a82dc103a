#pragma once

#include <penstock/config.hpp>

#include <type_traits>

/// The axes of the vocabulary, and the machinery that picks one policy for each from a list in any order.

namespace penstock::inline v0_1 {

namespace axis {

struct memory {};
struct chunking {};
struct prefetch {};
struct scheduling {};
struct eviction {};

}  // namespace axis

/// A policy is a type that names the axis on which it chooses.
template <class P>
concept policy = requires {
    typename P::policy_axis;
};

template <class P, class Axis>
concept policy_for = policy<P> && std::is_same_v<typename P::policy_axis, Axis>;

namespace detail {

template <class P, class Axis>
inline constexpr bool on_axis = false;
template <class P, class Axis>
    requires policy<P>
inline constexpr bool on_axis<P, Axis> = std::is_same_v<typename P::policy_axis, Axis>;

template <class... Ps>
inline constexpr bool all_policies = (policy<Ps> && ... && true);

template <class Axis, class... Ps>
inline constexpr int axis_count = (0 + ... + (on_axis<Ps, Axis> ? 1 : 0));

template <class Axis, class Default, class... Ps>
struct pick {
    using type = Default;
};
template <class Axis, class Default, class First, class... Rest>
struct pick<Axis, Default, First, Rest...> {
    using type = typename std::conditional_t<on_axis<First, Axis>, std::type_identity<First>, pick<Axis, Default, Rest...>>::type;
};

}  // namespace detail

/// The policy on `Axis` among `Ps`, or `Default`. Products use it after PENSTOCK_CHECK_POLICIES.
template <class Axis, class Default, class... Ps>
using pick_policy = typename detail::pick<Axis, Default, Ps...>::type;

}  // namespace penstock::inline v0_1
