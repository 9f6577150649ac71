// Python bindings of punkt.hpp (sentence splitting); documented in mdata/_core.pyi.
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "punkt.hpp"

namespace {

namespace py = pybind11;
namespace punkt = mdata::punkt;

// Python's own memory of a text: code points of 1, 2 or 4 bytes.
struct Text {
    py::object owner;  // others may change the list while the GIL is free
    int width;
    const void* data;
    std::size_t size;
};

Text text_of(py::handle object) {
    if (!PyUnicode_Check(object.ptr())) throw py::type_error("a list of str is expected");
#if PY_VERSION_HEX < 0x030C0000
    if (PyUnicode_READY(object.ptr()) != 0) throw py::error_already_set();
#endif
    return {py::reinterpret_borrow<py::object>(object), static_cast<int>(PyUnicode_KIND(object.ptr())),
            PyUnicode_DATA(object.ptr()), static_cast<std::size_t>(PyUnicode_GET_LENGTH(object.ptr()))};
}

std::u32string word_of(py::handle object) {
    const Text text = text_of(object);
    std::u32string word(text.size, U'\0');
    for (std::size_t i = 0; i < text.size; ++i) {
        word[i] = PyUnicode_READ(text.width, text.data, static_cast<Py_ssize_t>(i));
    }
    return word;
}

struct Sentences {
    std::vector<punkt::Span> spans;
    std::vector<std::size_t> counts;
    bool unsure = false;
};

class Punkt {
public:
    Punkt(const py::iterable& abbreviations, const py::iterable& collocations, const py::dict& contexts,
          const py::iterable& starters, bool keep_newlines, std::size_t slice_chars)
        : keep_newlines_(keep_newlines), slice_chars_(slice_chars) {
        if (slice_chars == 0) throw std::invalid_argument("slice_chars is 0");
        for (const py::handle word : abbreviations) tables_.add_abbreviation(word_of(word));
        for (const py::handle word : starters) tables_.add_starter(word_of(word));
        for (const auto& [word, bits] : contexts) tables_.add_context(word_of(word), bits.cast<std::uint8_t>());
        for (const py::handle pair : collocations) {
            const auto words = py::reinterpret_borrow<py::object>(pair).cast<py::tuple>();
            if (words.size() != 2) throw std::invalid_argument("a collocation is a pair");
            tables_.add_collocation(word_of(words[0]), word_of(words[1]));
        }
    }

    py::object split(const py::list& texts, const py::dict& newer) const {
        std::vector<Text> views;
        views.reserve(texts.size());
        for (const py::handle text : texts) views.push_back(text_of(text));
        punkt::Newer known;
        for (const auto& [code, facts] : newer) {
            const auto [flags, lower] = facts.cast<std::pair<unsigned, py::str>>();
            known[code.cast<std::uint32_t>()] = {flags, word_of(lower)};
        }
        Sentences found;
        {
            const py::gil_scoped_release unlocked;
            found = split_all(views, known);
        }
        if (found.unsure) return py::none();
        return as_lists(views, found);
    }

private:
    template <typename Char>
    void split_one(punkt::Splitter<Char>& splitter, const Text& text, Sentences& found) const {
        const std::span<const Char> whole(static_cast<const Char*>(text.data), text.size);
        for (std::size_t start = 0; start < text.size; start += slice_chars_) {
            splitter.split(whole.subspan(start, std::min(slice_chars_, text.size - start)), start, found.spans);
        }
    }

    Sentences split_all(const std::vector<Text>& texts, const punkt::Newer& newer) const {
        punkt::Splitter<std::uint8_t> narrow(tables_, newer, keep_newlines_);
        punkt::Splitter<std::uint16_t> wide(tables_, newer, keep_newlines_);
        punkt::Splitter<char32_t> widest(tables_, newer, keep_newlines_);
        Sentences found;
        found.counts.reserve(texts.size());
        for (const Text& text : texts) {
            if (text.width == PyUnicode_1BYTE_KIND) split_one(narrow, text, found);
            else if (text.width == PyUnicode_2BYTE_KIND) split_one(wide, text, found);
            else split_one(widest, text, found);
            found.counts.push_back(found.spans.size());
        }
        found.unsure = narrow.unsure() || wide.unsure() || widest.unsure();
        return found;
    }

    static py::object as_lists(const std::vector<Text>& texts, const Sentences& found) {
        py::list sentences(found.spans.size());
        std::size_t number = 0;
        for (std::size_t text = 0; text < texts.size(); ++text) {
            for (; number < found.counts[text]; ++number) {
                const auto [start, stop] = found.spans[number];
                PyObject* sentence = PyUnicode_Substring(texts[text].owner.ptr(), static_cast<Py_ssize_t>(start),
                                                         static_cast<Py_ssize_t>(stop));
                if (sentence == nullptr) throw py::error_already_set();
                PyList_SET_ITEM(sentences.ptr(), static_cast<Py_ssize_t>(number), sentence);
            }
        }
        return py::make_tuple(sentences, found.counts);
    }

    punkt::Tables tables_;
    bool keep_newlines_;
    std::size_t slice_chars_;
};

std::pair<unsigned, std::int32_t> punkt_character(std::uint32_t code) {
    if (code > 0x10FFFF) throw std::out_of_range("no code point");
    const punkt::Kind& kind = punkt::kind_of(code);
    return {kind.flags, kind.to_lower};
}

}  // namespace

void mdata::bind_punkt(pybind11::module_& module) {
    py::class_<Punkt>(module, "Punkt")
        .def(py::init<const py::iterable&, const py::iterable&, const py::dict&, const py::iterable&, bool,
                      std::size_t>(),
             py::arg("abbreviations"), py::arg("collocations"), py::arg("contexts"), py::arg("starters"),
             py::arg("keep_newlines"), py::arg("slice_chars"))
        .def("split", &Punkt::split, py::arg("texts"), py::arg("newer"));
    module.def("punkt_character", &punkt_character, py::arg("code"));
}
