// Python bindings of mersenne.hpp and megatron_order.hpp; documented in mdata/_core.pyi.
#include <algorithm>

#include "bindings.hpp"
#include "megatron_order.hpp"
#include "mersenne.hpp"

namespace {

namespace py = pybind11;
using mdata::Array;
using mdata::Int32s;
using mdata::Int64s;
using mdata::Mersenne;
using mdata::mutable_view;
using mdata::view;

std::int64_t integer(Mersenne& generator, std::int64_t low, std::int64_t high) {
    if (low >= high) throw std::invalid_argument("an empty range");
    return generator.integer(low, high);
}

std::size_t pick(Mersenne& generator, const mdata::Array<double>& bounds) { return generator.pick(view(bounds)); }

std::int64_t geometric(Mersenne& generator, double p) {
    if (!(p > 0.0 && p < 1.0 / 3.0)) throw std::invalid_argument("p is not in (0, 1/3)");
    return generator.geometric(p);
}

template <typename T>
void shuffle(Mersenne& generator, Array<T>& values) {
    const auto inside = mutable_view(values);
    const py::gil_scoped_release unlocked;
    generator.shuffle(inside);
}

void swap_onwards(Mersenne& generator, Int64s& values) {
    const auto inside = mutable_view(values);
    const py::gil_scoped_release unlocked;
    generator.swap_onwards(inside);
}

template <typename Place>
void check_order(std::span<const Place> order, std::size_t num_lengths) {
    Place smallest = 0;
    Place largest = 0;
    for (const Place place : order) {
        smallest = std::min(smallest, place);
        largest = std::max(largest, place);
    }
    if (smallest < 0 || (!order.empty() && static_cast<std::size_t>(largest) >= num_lengths)) {
        throw std::out_of_range("a document number outside of the lengths");
    }
}

// Their bytes alone are looked at: numpy's arrays may lie anywhere.
mdata::Lengths unaligned(const Int32s& lengths) {
    if (lengths.ndim() != 1) throw std::invalid_argument("an array of one dimension is expected");
    const auto* bytes = reinterpret_cast<const std::byte*>(static_cast<const py::array&>(lengths).data());
    return mdata::Lengths{std::span(bytes, static_cast<std::size_t>(lengths.nbytes()))};
}

template <typename Place, typename Row>
void sample_index(const Int32s& lengths, const Array<Place>& order, std::int64_t sequence_length, std::int64_t extra,
                  std::size_t threads, Array<Row>& rows) {
    const auto places = view(order);
    const auto out = mutable_view(rows);
    if (sequence_length < 1 || extra < 0 || extra > 1) throw std::invalid_argument("a sequence length below 1, or extra");
    if (out.size() < 2 || out.size() % 2 != 0) throw std::invalid_argument("rows of two numbers are expected");
    const auto last = static_cast<std::int64_t>(out.size() / 2 - 1);
    const mdata::SampleIndex<Row> index{unaligned(lengths), sequence_length, extra, last, out};
    const py::gil_scoped_release unlocked;
    check_order(places, index.lengths.size());
    mdata::fill_sample_index(index, places, threads);
}

template <typename Place, typename Row>
void def_sample_index(py::module_& module) {
    module.def("fill_sample_index", &sample_index<Place, Row>, py::arg("lengths").noconvert(),
               py::arg("order").noconvert(), py::arg("sequence_length"), py::arg("extra"), py::arg("threads"),
               py::arg("rows").noconvert());
}

}  // namespace

void mdata::bind_orders(py::module_& module) {
    py::class_<Mersenne>(module, "Mersenne")
        .def(py::init<std::uint32_t>(), py::arg("seed"))
        .def("up_to", &Mersenne::up_to, py::arg("most"))
        .def("integer", &integer, py::arg("low"), py::arg("high"))
        .def("real", &Mersenne::real)
        .def("pick", &pick, py::arg("bounds").noconvert())
        .def("geometric", &geometric, py::arg("p"))
        .def("swap_onwards", &swap_onwards, py::arg("values").noconvert())
        .def("shuffle", &shuffle<std::int32_t>, py::arg("values").noconvert())
        .def("shuffle", &shuffle<std::int64_t>, py::arg("values").noconvert())
        .def("shuffle", &shuffle<std::uint32_t>, py::arg("values").noconvert());
    def_sample_index<std::int32_t, std::int32_t>(module);
    def_sample_index<std::int32_t, std::int64_t>(module);
    def_sample_index<std::int64_t, std::int64_t>(module);
}
