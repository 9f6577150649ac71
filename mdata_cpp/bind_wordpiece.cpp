// Python bindings of wordpiece.hpp (WordPiece) and of a trie alone (GreedyTrie); documented in mdata/_core.pyi.
#include "bindings.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "wordpiece.hpp"

namespace {

namespace py = pybind11;
namespace wp = mdata::wordpiece;

// The keys of a dict, str or bytes, as views with their values. The keys are kept: see Utf8Texts.
struct Items {
    explicit Items(const py::dict& values) : keys(values) {
        for (const auto& [key, value] : values) {
            const bool is_bytes = py::isinstance<py::bytes>(key);
            views.push_back({is_bytes ? key.cast<std::string_view>() : mdata::utf8_of(key), value.cast<std::int32_t>()});
        }
    }

    py::list keys;
    std::vector<wp::Item> views;
};

using Flags = std::array<bool, 4>;

std::unique_ptr<wp::Encoder> make(const py::dict& vocabulary, const py::dict& added, std::int32_t unknown,
                                  std::string prefix, std::uint64_t most_chars, const Flags& treatment) {
    const Items entries(vocabulary), tokens(added);
    for (const wp::Item& entry : entries.views)
        if (entry.value < 0) throw std::invalid_argument("an entry of the vocabulary has a negative id");
    const std::uint64_t most = std::min<std::uint64_t>(most_chars, std::numeric_limits<std::uint32_t>::max());
    const wp::Settings settings{std::move(prefix), static_cast<std::size_t>(most), unknown,
                                {treatment[0], treatment[1], treatment[2], treatment[3]}};
    const py::gil_scoped_release unlocked;
    return std::make_unique<wp::Encoder>(entries.views, tokens.views, settings);
}

py::tuple encode(const wp::Encoder& encoder, const py::list& texts, const std::vector<std::int32_t>& before,
                 const std::vector<std::int32_t>& after) {
    const mdata::Utf8Texts views(texts);
    wp::Batch batch;
    {
        const py::gil_scoped_release unlocked;
        batch = encoder.encode(views, before, after);
    }
    return py::make_tuple(mdata::as_array(std::move(batch.ids)), mdata::as_array(std::move(batch.lengths)),
                          mdata::as_array(std::move(batch.left)));
}

std::unique_ptr<wp::Trie> make_trie(const py::dict& ids) {
    const Items tokens(ids);
    std::vector<bool> has_entry(256);
    for (const wp::Item& token : tokens.views)
        if (token.text.size() == 1) has_entry[static_cast<unsigned char>(token.text[0])] = true;
    if (std::find(has_entry.begin(), has_entry.end(), false) != has_entry.end())
        throw std::invalid_argument("a byte has no entry");
    const py::gil_scoped_release unlocked;
    return std::make_unique<wp::Trie>(tokens.views);
}

py::tuple encode_longest(const wp::Trie& trie, const py::list& texts) {
    const mdata::Utf8Texts views(texts);
    std::vector<std::int32_t> ids;
    std::vector<std::int64_t> lengths;
    {
        const py::gil_scoped_release unlocked;
        for (const std::string_view text : views) {
            const std::size_t before = ids.size();
            wp::append_longest(trie, text, ids);
            lengths.push_back(static_cast<std::int64_t>(ids.size() - before));
        }
    }
    return py::make_tuple(mdata::as_array(std::move(ids)), mdata::as_array(std::move(lengths)));
}

std::optional<std::vector<std::string>> words(const wp::Encoder& encoder, const std::string& text) {
    std::vector<std::string> found;
    if (!encoder.words(text, found)) return std::nullopt;
    return found;
}

template <typename Rows>
py::list ranges_of(const Rows& rows) {
    py::list ranges;
    for (const auto& row : rows) ranges.append(py::make_tuple(row.first, row.last));
    return ranges;
}

py::dict classes() {
    py::dict found;
    found["dropped"] = ranges_of(wp::kDropped);
    found["blank"] = ranges_of(wp::kBlank);
    found["cjk"] = ranges_of(wp::kCjk);
    found["accent"] = ranges_of(wp::kMark);
    found["punctuation"] = ranges_of(wp::kPunctuation);
    found["space_in_pretokenizer"] = ranges_of(wp::kSpace);
    found["unsettled"] = ranges_of(wp::kUnsettled);
    return found;
}

}  // namespace

void mdata::bind_wordpiece(pybind11::module_& module) {
    py::class_<wp::Encoder>(module, "WordPiece")
        .def(py::init(&make), py::arg("vocabulary"), py::arg("added"), py::arg("unknown"), py::arg("prefix"),
             py::arg("most_chars"), py::arg("treatment"))
        .def("encode", &encode, py::arg("texts"), py::arg("before"), py::arg("after"))
        .def("words", &words, py::arg("text"))
        .def_static("classes", &classes);
    py::class_<wp::Trie>(module, "GreedyTrie")
        .def(py::init(&make_trie), py::arg("ids"))
        .def("encode", &encode_longest, py::arg("texts"));
}
