// Python bindings of minhash.hpp, record_runs.hpp and suffix_array.hpp; documented in mdata/_core.pyi.
#include "bindings.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "minhash.hpp"
#include "record_runs.hpp"
#include "suffix_array.hpp"

namespace {

namespace py = pybind11;
namespace mh = mdata::minhash;
namespace runs = mdata::runs;
using Words = mdata::Array<std::uint64_t>;

const mh::NormalForm& normal_form() {
    static const mh::NormalForm form;
    return form;
}

// (the normal forms joined, where each ends, keys [n, bands], whether each has an n-gram)
py::tuple sign(const mh::Signer& signer, const py::list& texts) {
    const mdata::Utf8Texts views(texts);
    std::string forms;
    std::vector<std::int64_t> ends;
    std::vector<std::uint64_t> keys(views.size() * signer.bands());
    std::vector<std::uint8_t> has_ngram(views.size());
    {
        const py::gil_scoped_release unlocked;
        std::vector<std::size_t> begins;
        std::vector<std::uint64_t> hashes, signature;
        for (std::size_t number = 0; number < views.size(); ++number) {
            const std::size_t start = forms.size();
            begins.clear();
            signer.normal_form(normal_form(), views[number], forms, begins);
            ends.push_back(static_cast<std::int64_t>(forms.size()));
            const std::string_view form = std::string_view(forms).substr(start);
            signer.ngram_hashes(form, begins, hashes);
            has_ngram[number] = !hashes.empty();
            if (hashes.empty()) continue;
            signer.signature(form, hashes, signature);
            signer.band_keys(signature, keys.data() + number * signer.bands());
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

// (the sorted distinct hashes of the n-grams of each text, one after the other, where each ends)
py::tuple ngram_sets(const mh::Signer& signer, const py::list& texts) {
    const mdata::Utf8Texts views(texts);
    std::vector<std::uint64_t> all;
    std::vector<std::int64_t> ends;
    {
        const py::gil_scoped_release unlocked;
        std::string form;
        std::vector<std::size_t> begins;
        std::vector<std::uint64_t> hashes;
        for (const std::string_view text : views) {
            form.clear(), begins.clear();
            signer.normal_form(normal_form(), text, form, begins);
            signer.ngram_hashes(form, begins, hashes);
            std::sort(hashes.begin(), hashes.end());
            all.insert(all.end(), hashes.begin(), std::unique(hashes.begin(), hashes.end()));
            ends.push_back(static_cast<std::int64_t>(all.size()));
        }
    }
    return py::make_tuple(mdata::as_array(std::move(all)), mdata::as_array(std::move(ends)));
}

std::size_t checked_words(std::size_t words) {
    if (words != 2 && words != 3) throw std::invalid_argument("records of a key of one or two words, and a number");
    return words;
}

void sort_records(Words& records) {
    const std::span<std::uint64_t> all(records.mutable_data(), static_cast<std::size_t>(records.size()));
    const std::size_t words = checked_words(records.ndim() == 2 ? static_cast<std::size_t>(records.shape(1)) : 0);
    const py::gil_scoped_release unlocked;
    words == 2 ? runs::sort_records<2>(all) : runs::sort_records<3>(all);
}

// Errors of the system become OSError.
template <typename Call>
auto with_os_errors(const Call& call) {
    try {
        const py::gil_scoped_release unlocked;
        return call();
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
}

using SliceFacts = std::tuple<int, std::uint64_t, std::uint64_t, std::uint64_t>;

runs::Slice slice_of(const SliceFacts& facts) {
    return {std::get<0>(facts), std::get<1>(facts), std::get<2>(facts), std::get<3>(facts)};
}

std::unique_ptr<runs::Merger> merger(const std::vector<SliceFacts>& slices, std::size_t words,
                                     std::size_t buffer_bytes) {
    checked_words(words);
    std::vector<runs::Slice> all;
    for (const SliceFacts& facts : slices) all.push_back(slice_of(facts));
    return with_os_errors([&] {
        return std::make_unique<runs::Merger>(std::move(all), words, buffer_bytes / (words * sizeof(std::uint64_t)));
    });
}

py::array shaped(std::vector<std::uint64_t>&& values, std::size_t width) {
    const auto count = static_cast<py::ssize_t>(values.size() / width);
    return mdata::as_array(std::move(values)).reshape({count, static_cast<py::ssize_t>(width)});
}

std::uint64_t count_below(const SliceFacts& slice, std::size_t words, std::uint64_t key) {
    checked_words(words);
    return with_os_errors([&] { return runs::count_below(slice_of(slice), words, key); });
}

// For each row (file, offset, count, file, offset, count) of two sets: how many words they have in common.
py::array common_words(const Words& sets) {
    if (sets.ndim() != 2 || sets.shape(1) != 6) throw std::invalid_argument("two sets in each row");
    const std::uint64_t* at = sets.data();
    const auto count = static_cast<std::size_t>(sets.shape(0));
    std::vector<std::uint64_t> common(count);
    with_os_errors([&] {
        std::array<std::vector<std::uint64_t>, 2> buffers;
        for (std::size_t number = 0; number < count; ++number, at += 6) {
            const runs::WordSet one{static_cast<int>(at[0]), at[1], at[2]}, other{static_cast<int>(at[3]), at[4], at[5]};
            common[number] = runs::common_words(one, other, buffers);
        }
    });
    return mdata::as_array(std::move(common));
}

void join_groups(mdata::Int64s& parents, const Words& edges) {
    const std::span<const std::uint64_t> ends(edges.data(), static_cast<std::size_t>(edges.size()));
    auto roots = mdata::mutable_view(parents);
    const py::gil_scoped_release unlocked;
    runs::join_groups(roots, ends);
}

void flatten_groups(mdata::Int64s& parents) {
    auto roots = mdata::mutable_view(parents);
    const py::gil_scoped_release unlocked;
    runs::flatten_groups(roots);
}

std::span<const std::uint8_t> bytes_of(const py::bytes& bytes) {
    const std::string_view view(bytes);
    return {reinterpret_cast<const std::uint8_t*>(view.data()), view.size()};
}

py::array suffix_array(const py::bytes& text) {
    const auto bytes = bytes_of(text);
    std::vector<std::int32_t> suffixes;
    {
        const py::gil_scoped_release unlocked;
        suffixes = mdata::suffixes::suffix_array(bytes);
    }
    return mdata::as_array(std::move(suffixes));
}

py::array repeated_ranges(const py::bytes& text, const mdata::Int64s& ends, std::size_t length) {
    const auto bytes = bytes_of(text);
    const auto documents = mdata::view(ends);
    std::vector<std::int64_t> ranges;
    {
        const py::gil_scoped_release unlocked;
        ranges = mdata::suffixes::repeated_ranges(bytes, documents, length);
    }
    const auto count = static_cast<py::ssize_t>(ranges.size() / 2);
    return mdata::as_array(std::move(ranges)).reshape({count, py::ssize_t{2}});
}

template <typename Kind>
Kind named(const char* kind, const std::string& name, const std::vector<std::pair<std::string, Kind>>& known) {
    for (const auto& [text, value] : known)
        if (text == name) return value;
    throw std::invalid_argument(std::string("no such ") + kind + ": " + name);
}

}  // namespace

namespace mdata {

void bind_minhash(py::module_& module) {
    py::class_<mh::Signer>(module, "MinHashSigner")
        .def(py::init([](const Words& a, const Words& b, std::size_t rows, std::size_t ngram, const std::string& unit,
                         const std::string& hash) {
                 const auto units = named<mh::Unit>("unit", unit,
                                                    {{"words", mh::Unit::words},
                                                     {"characters", mh::Unit::characters},
                                                     {"given", mh::Unit::given},
                                                     {"raw", mh::Unit::raw}});
                 const auto hashes = named<mh::Hash>("hash", hash,
                                                     {{"xxhash64", mh::Hash::xxh64},
                                                      {"sha1-64", mh::Hash::sha1_64},
                                                      {"sha1-32", mh::Hash::sha1_32},
                                                      {"murmur3", mh::Hash::murmur3}});
                 return std::make_unique<mh::Signer>(view(a), view(b), rows, ngram, units, hashes);
             }),
             py::arg("a"), py::arg("b"), py::arg("rows"), py::arg("ngram"), py::arg("unit") = "words",
             py::arg("hash") = "xxhash64")
        .def("sign", &sign, py::arg("texts"))
        .def("minima", &minima, py::arg("hashes"))
        .def("ngram_sets", &ngram_sets, py::arg("texts"));
    py::class_<runs::Merger>(module, "RunMerger")
        .def(py::init(&merger), py::arg("slices"), py::arg("words"), py::arg("buffer_bytes"))
        .def(
            "records",
            [](runs::Merger& self, std::size_t limit) {
                std::vector<std::uint64_t> records;
                with_os_errors([&] { self.read(limit, records); });
                return shaped(std::move(records), self.words());
            },
            py::arg("limit"))
        .def(
            "edges",
            [](runs::Merger& self, std::size_t limit, bool chain) {
                std::vector<std::uint64_t> pairs;
                with_os_errors([&] { self.edges(limit, chain, pairs); });
                return shaped(std::move(pairs), 2);
            },
            py::arg("limit"), py::arg("chain"));
    module.def("sort_records", &sort_records, py::arg("records").noconvert());
    module.def("count_below", &count_below, py::arg("slice"), py::arg("words"), py::arg("key"));
    module.def("common_words", &common_words, py::arg("sets").noconvert());
    module.def("join_groups", &join_groups, py::arg("parents").noconvert(), py::arg("edges"));
    module.def("suffix_array", &suffix_array, py::arg("text"));
    module.def("repeated_ranges", &repeated_ranges, py::arg("text"), py::arg("ends"), py::arg("length"));
    module.def("flatten_groups", &flatten_groups, py::arg("parents").noconvert());
    module.def("sha1", [](const py::bytes& bytes, std::size_t size) {
        if (size == 0 || size > 8) throw std::invalid_argument("1 to 8 bytes of a hash");
        return mh::sha1(std::string_view(bytes), size);
    }, py::arg("data"), py::arg("size"));
    module.def("xxh64", [](const py::bytes& bytes) { return mh::xxh64(std::string_view(bytes)); }, py::arg("data"));
}

}  // namespace mdata
