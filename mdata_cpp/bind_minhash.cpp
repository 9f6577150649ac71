// Python bindings of minhash.hpp; documented in mdata/_core.pyi.
#include "bindings.hpp"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "minhash.hpp"

namespace {

namespace py = pybind11;
namespace mh = mdata::minhash;
using Words = mdata::Array<std::uint64_t>;

const mh::NormalForm& normal_form() {
    static const mh::NormalForm form;
    return form;
}

// (the normal forms joined, where each ends, keys [n, bands], whether each has an n-gram)
py::tuple sign(const mh::Signer& signer, const py::list& texts) {
    const auto views = mdata::utf8_of(texts);
    std::string forms;
    std::vector<std::int64_t> ends;
    std::vector<std::uint64_t> keys(views.size() * signer.bands());
    std::vector<std::uint8_t> has_ngram(views.size());
    {
        const py::gil_scoped_release unlocked;
        std::vector<std::uint32_t> begins;
        std::vector<std::uint64_t> hashes, signature;
        for (std::size_t number = 0; number < views.size(); ++number) {
            const std::size_t start = forms.size();
            begins.clear();
            normal_form().append(views[number], forms, begins);
            ends.push_back(static_cast<std::int64_t>(forms.size()));
            signer.ngram_hashes(std::string_view(forms).substr(start), begins, hashes);
            has_ngram[number] = !hashes.empty();
            if (hashes.empty()) continue;
            signer.minima(hashes, signature);
            signer.band_keys(signature, &keys[number * signer.bands()]);
        }
    }
    const auto count = static_cast<py::ssize_t>(views.size()), bands = static_cast<py::ssize_t>(signer.bands());
    return py::make_tuple(py::bytes(forms), mdata::as_array(std::move(ends)),
                          mdata::as_array(std::move(keys)).reshape({count, bands}),
                          mdata::as_array(std::move(has_ngram)));
}

py::array minima(const mh::Signer& signer, const Words& hashes) {
    if (hashes.size() == 0) throw std::invalid_argument("a signature needs at least one hash");
    const auto values = mdata::view(hashes);
    std::vector<std::uint64_t> signature;
    {
        const py::gil_scoped_release unlocked;
        signer.minima(values, signature);
    }
    return mdata::as_array(std::move(signature));
}

std::size_t words_of(const Words& records) {
    const auto words = records.ndim() == 2 ? records.shape(1) - 1 : 0;
    if (words != 1 && words != 2) throw std::invalid_argument("records of a key of one or two words, and a number");
    return static_cast<std::size_t>(words);
}

void sort_records(Words& records) {
    const std::span<std::uint64_t> all(records.mutable_data(), static_cast<std::size_t>(records.size()));
    const std::size_t words = words_of(records);
    const py::gil_scoped_release unlocked;
    words == 1 ? mh::sort_records<1>(all) : mh::sort_records<2>(all);
}

py::array edges_of(const std::vector<Words>& arrays, const std::vector<std::uint64_t>& added) {
    if (arrays.size() != added.size()) throw std::invalid_argument("a number to add for each run");
    std::vector<mh::Run> runs;
    std::size_t words = 1;
    for (std::size_t run = 0; run < arrays.size(); ++run) {
        words = words_of(arrays[run]);
        if (words != words_of(arrays[0])) throw std::invalid_argument("all runs have keys of the same size");
        runs.push_back({{arrays[run].data(), static_cast<std::size_t>(arrays[run].size())}, added[run]});
    }
    std::vector<std::uint64_t> edges;
    {
        const py::gil_scoped_release unlocked;
        edges = words == 1 ? mh::edges_of<1>(runs) : mh::edges_of<2>(runs);
    }
    const auto count = static_cast<py::ssize_t>(edges.size() / 2);
    return mdata::as_array(std::move(edges)).reshape({count, py::ssize_t{2}});
}

void join_groups(mdata::Int64s& parents, const Words& edges) {
    const std::span<const std::uint64_t> ends(edges.data(), static_cast<std::size_t>(edges.size()));
    auto roots = mdata::mutable_view(parents);
    const py::gil_scoped_release unlocked;
    mh::join_groups(roots, ends);
}

}  // namespace

namespace mdata {

void bind_minhash(py::module_& module) {
    py::class_<mh::Signer>(module, "MinHashSigner")
        .def(py::init([](const Words& a, const Words& b, std::size_t rows, std::size_t ngram) {
                 return std::make_unique<mh::Signer>(view(a), view(b), rows, ngram);
             }),
             py::arg("a"), py::arg("b"), py::arg("rows"), py::arg("ngram"))
        .def("sign", &sign, py::arg("texts"))
        .def("minima", &minima, py::arg("hashes"));
    module.def("sort_records", &sort_records, py::arg("records").noconvert());
    module.def("bucket_edges", &edges_of, py::arg("runs"), py::arg("added"));
    module.def("join_groups", &join_groups, py::arg("parents").noconvert(), py::arg("edges"));
    module.def("xxh64", [](const py::bytes& bytes) { return mh::xxh64(std::string_view(bytes)); }, py::arg("data"));
}

}  // namespace mdata
