// Python bindings of the core: check and convert arguments, release the GIL. The algorithms are in the headers.
//
// Arrays come in as C-contiguous arrays of exactly the dtype named in mdata/_core.pyi (no silent conversion) and are
// returned as new arrays. std::invalid_argument, out_of_range and overflow_error become ValueError, IndexError and
// OverflowError.
#include "bindings.hpp"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "blend.hpp"
#include "index.hpp"
#include "permutation.hpp"
#include "philox.hpp"

namespace {

namespace py = pybind11;
using mdata::Int32s;
using mdata::Int64s;
using mdata::mutable_view;
using mdata::view;

void check_same_size(std::size_t a, std::size_t b) {
    if (a != b) throw std::invalid_argument("the two arrays differ in size");
}

Int64s map_places(const mdata::Permutation& permutation, const Int64s& from, bool forward) {
    Int64s to(from.size());
    const auto in = view(from);
    const auto out = mutable_view(to);
    const py::gil_scoped_release unlocked;
    forward ? permutation.forward(in, out) : permutation.inverse(in, out);
    return to;
}

// [first, first + n) in the order of a permutation.
Int64s shuffled_range(std::int64_t first, std::int64_t n, std::uint64_t key_low, std::uint64_t key_high) {
    if (n < 1) throw std::invalid_argument("n is below 1");
    Int64s to(static_cast<py::ssize_t>(n));
    const auto out = mutable_view(to);
    const py::gil_scoped_release unlocked;
    const mdata::Permutation permutation(out.size(), {key_low, key_high});
    std::vector<std::int64_t> places(out.size());
    std::iota(places.begin(), places.end(), std::int64_t{0});
    permutation.spread(places, 0, first, 1, out);
    return to;
}

void bind_philox(py::module_& module) {
    module.def(
        "philox4x32",
        [](const mdata::Counter& counter, const mdata::PhiloxKey& key) { return mdata::philox4x32(counter, key); },
        py::arg("counter"), py::arg("key"));
}

void bind_permutation(py::module_& module) {
    using mdata::Permutation;
    py::class_<Permutation>(module, "Permutation")
        .def(py::init([](std::uint64_t n, std::uint64_t key_low, std::uint64_t key_high) {
                 return Permutation(n, {key_low, key_high});
             }),
             py::arg("n"), py::arg("key_low"), py::arg("key_high"))
        .def(
            "forward", [](const Permutation& self, const Int64s& places) { return map_places(self, places, true); },
            py::arg("places").noconvert())
        .def(
            "inverse", [](const Permutation& self, const Int64s& values) { return map_places(self, values, false); },
            py::arg("values").noconvert())
        .def(py::pickle(
            [](const Permutation& self) { return py::make_tuple(self.size(), self.key().low, self.key().high); },
            [](const py::tuple& state) {
                return Permutation(state[0].cast<std::uint64_t>(),
                                   {state[1].cast<std::uint64_t>(), state[2].cast<std::uint64_t>()});
            }));
    module.def("shuffled_range", &shuffled_range, py::arg("first"), py::arg("n"), py::arg("key_low"), py::arg("key_high"));
}

py::tuple locate(const mdata::BlendTree& tree, const Int64s& samples) {
    Int64s components(samples.size());
    Int64s inside(samples.size());
    const auto in = view(samples);
    const auto out = mutable_view(components);
    const auto out_inside = mutable_view(inside);
    {
        const py::gil_scoped_release unlocked;
        tree.locate(in, out, out_inside);
    }
    return py::make_tuple(components, inside);
}

Int64s blend_inverse(const mdata::BlendTree& tree, const Int64s& components, const Int64s& samples) {
    check_same_size(view(components).size(), view(samples).size());
    Int64s blended(components.size());
    const auto in = view(components);
    const auto inside = view(samples);
    const auto out = mutable_view(blended);
    const py::gil_scoped_release unlocked;
    tree.inverse(in, inside, out);
    return blended;
}

void bind_blend(py::module_& module) {
    using mdata::BlendTree;
    py::class_<BlendTree>(module, "BlendTree")
        .def(py::init([](const std::vector<std::uint64_t>& weights) { return BlendTree(weights); }),
             py::arg("weights"))
        .def("locate", &locate, py::arg("samples").noconvert())
        .def("inverse", &blend_inverse, py::arg("components").noconvert(), py::arg("samples").noconvert())
        .def(
            "counts",
            [](const BlendTree& self, std::uint64_t num_samples) {
                std::vector<std::uint64_t> counts(self.num_components());
                self.counts(num_samples, counts);
                return counts;
            },
            py::arg("num_samples"));
}

const char* fault_name(mdata::Fault fault) {
    switch (fault) {
        case mdata::Fault::none: return "";
        case mdata::Fault::length_negative: return "length_negative";
        case mdata::Fault::pointer_negative: return "pointer_negative";
        case mdata::Fault::pointer_unaligned: return "pointer_unaligned";
        case mdata::Fault::pointer_past_end: return "pointer_past_end";
        case mdata::Fault::boundary_start: return "boundary_start";
        case mdata::Fault::boundary_decreases: return "boundary_decreases";
        case mdata::Fault::boundary_past_end: return "boundary_past_end";
    }
    return "unknown";
}

py::tuple pointers_from_lengths(const Int32s& lengths, std::int64_t item_size, std::int64_t start) {
    Int64s pointers(lengths.size());
    const auto in = view(lengths);
    const auto out = mutable_view(pointers);
    std::int64_t end = 0;
    {
        const py::gil_scoped_release unlocked;
        end = mdata::pointers_from_lengths(in, item_size, start, out);
    }
    return py::make_tuple(pointers, end);
}

py::tuple check_sequences(const Int32s& lengths, const Int64s& pointers, std::int64_t item_size,
                          std::int64_t bin_size, std::int64_t expected) {
    const auto in = view(lengths);
    const auto at = view(pointers);
    check_same_size(in.size(), at.size());
    mdata::SequenceCheck result;
    {
        const py::gil_scoped_release unlocked;
        result = mdata::check_sequences(in, at, item_size, bin_size, expected);
    }
    return py::make_tuple(fault_name(result.fault), result.entry, result.contiguous, result.next, result.bytes);
}

py::tuple check_boundaries(const Int64s& boundaries, std::int64_t num_sequences, std::int64_t previous) {
    const auto in = view(boundaries);
    mdata::BoundaryCheck result;
    {
        const py::gil_scoped_release unlocked;
        result = mdata::check_boundaries(in, num_sequences, previous);
    }
    return py::make_tuple(fault_name(result.fault), result.entry);
}

void bind_index(py::module_& module) {
    module.def("pointers_from_lengths", &pointers_from_lengths, py::arg("lengths").noconvert(),
               py::arg("item_size"), py::arg("start"));
    module.def("check_sequences", &check_sequences, py::arg("lengths").noconvert(),
               py::arg("pointers").noconvert(), py::arg("item_size"), py::arg("bin_size"), py::arg("expected"));
    module.def("check_boundaries", &check_boundaries, py::arg("boundaries").noconvert(),
               py::arg("num_sequences"), py::arg("previous"));
}

}  // namespace

PYBIND11_MODULE(_core, module) {
    module.doc() = "The C++ core of mdata; documented in mdata/_core.pyi.";
    bind_philox(module);
    bind_permutation(module);
    bind_blend(module);
    bind_index(module);
    mdata::bind_megatron_blend(module);
    mdata::bind_files(module);
    mdata::bind_fim(module);
    mdata::bind_gather(module);
    mdata::bind_masked(module);
    mdata::bind_minhash(module);
    mdata::bind_orders(module);
    mdata::bind_packing(module);
    mdata::bind_punkt(module);
    mdata::bind_sentencepiece(module);
    mdata::bind_text_rules(module);
    mdata::bind_wordpiece(module);
}
