// Python bindings of fill in the middle and of single streams of draws; the algorithm is in fim.hpp.
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "fim.hpp"

namespace {

namespace py = pybind11;
using mdata::FimRule;
using mdata::Int64s;
using mdata::KeyedStream;
using mdata::view;

FimRule make_rule(std::vector<std::int64_t> ids, std::optional<std::int64_t> split, std::vector<std::int64_t> untouched,
                  double rate, double spm_rate, double fragment_rate) {
    if (ids.size() != 4) throw std::invalid_argument("prefix, middle, suffix and the end of a document are expected");
    return {ids[0], ids[1], ids[2], ids[3], split, std::move(untouched), rate, spm_rate, fragment_rate};
}

// What to rearrange: row places[i] of the text holds counts[i] tokens of sample numbers[i].
struct Job {
    std::span<const std::int64_t> numbers, places, counts;
    std::size_t width, limit, rows;

    void check() const {
        if (places.size() != numbers.size() || counts.size() != numbers.size())
            throw std::invalid_argument("a place and a count for each sample");
        if (limit > width) throw std::invalid_argument("a limit beyond the row");
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            if (places[i] < 0 || static_cast<std::uint64_t>(places[i]) >= rows) throw std::out_of_range("no such row");
            if (counts[i] < 0 || static_cast<std::uint64_t>(counts[i]) > width) throw std::invalid_argument("more tokens than the row has");
        }
    }
};

Int64s fim_rows(const FimRule& rule, std::pair<std::uint64_t, std::uint64_t> key, const Int64s& numbers, Int64s& text,
                const Int64s& places, const Int64s& counts, std::size_t limit, std::int64_t fill) {
    if (text.ndim() != 2) throw std::invalid_argument("rows of text are expected");
    const Job job{view(numbers), view(places), view(counts), static_cast<std::size_t>(text.shape(1)), limit,
                  static_cast<std::size_t>(text.shape(0))};
    job.check();
    Int64s kept(numbers.size());
    const auto out = mdata::mutable_view(kept);
    const auto cells = mdata::mutable_view(text);
    const py::gil_scoped_release unlocked;
    std::vector<std::int64_t> scratch;
    for (std::size_t i = 0; i < job.numbers.size(); ++i) {
        const KeyedStream draws({key.first, key.second}, static_cast<std::uint64_t>(job.numbers[i]));
        const auto row = cells.subspan(static_cast<std::size_t>(job.places[i]) * job.width, job.width);
        out[i] = mdata::fim_row(rule, draws, row, static_cast<std::size_t>(job.counts[i]), limit, fill, scratch);
    }
    return kept;
}

}  // namespace

void mdata::bind_fim(py::module_& module) {
    py::class_<KeyedStream>(module, "KeyedStream")
        .def(py::init([](std::uint64_t low, std::uint64_t high, std::uint64_t number) {
                 return KeyedStream({low, high}, number);
             }),
             py::arg("key_low"), py::arg("key_high"), py::arg("number"))
        .def("real", &KeyedStream::real)
        .def("up_to", &KeyedStream::up_to, py::arg("most"));
    py::class_<FimRule>(module, "FimRule")
        .def(py::init(&make_rule), py::arg("ids"), py::arg("split"), py::arg("untouched"), py::arg("rate"),
             py::arg("spm_rate"), py::arg("fragment_rate"));
    module.def("fim_rows", &fim_rows, py::arg("rule"), py::arg("key"), py::arg("numbers").noconvert(),
               py::arg("text").noconvert(), py::arg("places").noconvert(), py::arg("counts").noconvert(),
               py::arg("limit"), py::arg("fill"));
}
