// Python bindings of megatron_blend.hpp; documented in mdata/_core.pyi.
#include <numeric>

#include "bindings.hpp"
#include "megatron_blend.hpp"

namespace {

namespace py = pybind11;
using mdata::Array;
using mdata::GreedyFill;
using mdata::Int64s;
using mdata::mutable_view;
using mdata::view;

// The counts of a fill are doubles.
constexpr std::size_t kMostSamples = std::size_t{1} << 53;

template <typename Component>
void run(std::span<const double> weights, std::span<const std::int64_t> limits, Array<Component>& components,
         Int64s& samples) {
    const auto numbers = mutable_view(components);
    const auto inside = mutable_view(samples);
    if (numbers.size() != inside.size()) throw std::invalid_argument("components and samples differ in size");
    if (numbers.size() > kMostSamples) throw std::overflow_error("more than 2^53 samples");
    if (weights.size() > static_cast<std::size_t>(std::numeric_limits<Component>::max())) {
        throw std::overflow_error("more components than their numbers can tell apart");
    }
    const py::gil_scoped_release unlocked;
    GreedyFill(weights, limits, static_cast<std::int64_t>(numbers.size())).run(numbers, inside);
}

template <typename Component>
void weighted(const Array<double>& weights, Array<Component>& components, Int64s& samples) {
    run(view(weights), {}, components, samples);
}

template <typename Component>
void exhaustive(const Int64s& sizes, Array<Component>& components, Int64s& samples) {
    const auto limits = view(sizes);
    std::int64_t total = 0;
    for (const std::int64_t size : limits) {
        if (size < 0) throw std::invalid_argument("a size is negative");
        if (__builtin_add_overflow(total, size, &total)) throw std::overflow_error("the sizes sum to more than 2^63");
    }
    if (total != components.size()) throw std::invalid_argument("there is not one place for each sample");
    std::vector<double> weights;
    for (const std::int64_t size : limits) {
        weights.push_back(total == 0 ? 0.0 : static_cast<double>(size) / static_cast<double>(total));
    }
    run(weights, limits, components, samples);
}

template <typename Component>
void def_fills(py::module_& module) {
    module.def("fill_blend", &weighted<Component>, py::arg("weights").noconvert(), py::arg("components").noconvert(),
               py::arg("samples").noconvert());
    module.def("fill_blend_once", &exhaustive<Component>, py::arg("sizes").noconvert(),
               py::arg("components").noconvert(), py::arg("samples").noconvert());
}

}  // namespace

void mdata::bind_megatron_blend(py::module_& module) {
    def_fills<std::int16_t>(module);
    def_fills<std::int32_t>(module);
}
