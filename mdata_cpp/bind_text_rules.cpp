// Python bindings of text_rules.hpp and ngram_match.hpp; documented in mdata/_core.pyi.
#include "bindings.hpp"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ngram_match.hpp"
#include "text_rules.hpp"

namespace {

namespace py = pybind11;
namespace tx = mdata::text;

// Words of texts: our own, or those that Python gives as [begin, end) of bytes, one array [n, 2] for each text.
using Given = std::optional<std::vector<mdata::Array<std::int64_t>>>;

void read_words(std::string_view text, const Given& given, std::size_t number, std::vector<tx::Word>& words) {
    if (!given) return tx::split_words(text, words);
    words.clear();
    const auto& spans = (*given)[number];
    for (py::ssize_t word = 0; word < spans.size() / 2; ++word)
        words.push_back(tx::given_word(text, static_cast<std::uint32_t>(spans.data()[2 * word]),
                                       static_cast<std::uint32_t>(spans.data()[2 * word + 1])));
}

void check_given(std::span<const std::string_view> texts, const Given& given) {
    if (!given) return;
    if (given->size() != texts.size()) throw std::invalid_argument("an array of words for each text");
    for (std::size_t number = 0; number < texts.size(); ++number) {
        tx::check_size(texts[number]);
        const auto& spans = (*given)[number];
        if (spans.ndim() != 2 || spans.shape(1) != 2) throw std::invalid_argument("words as [begin, end)");
        const std::string_view text = texts[number];
        const auto size = static_cast<std::int64_t>(text.size());
        const auto is_border = [&](std::int64_t place) {
            return place == size || (static_cast<unsigned char>(text[static_cast<std::size_t>(place)]) & 0xC0) != 0x80;
        };
        std::int64_t last_end = 0;
        for (py::ssize_t word = 0; word < spans.shape(0); ++word) {
            const std::int64_t begin = spans.at(word, 0), end = spans.at(word, 1);
            if (begin < 0 || begin >= end || end > size) throw std::out_of_range("a word outside of its text");
            if (begin < last_end) throw std::invalid_argument("a word begins before the last one ended");
            if (!is_border(begin) || !is_border(end)) throw std::invalid_argument("a word begins or ends inside a character");
            last_end = end;
        }
    }
}

py::array reshaped(std::vector<double>&& values, std::size_t columns) {
    const auto rows = static_cast<py::ssize_t>(values.size() / columns);
    return mdata::as_array(std::move(values)).reshape({rows, static_cast<py::ssize_t>(columns)});
}

py::array gopher(const py::list& texts, const std::vector<std::string>& stop_words, const Given& given) {
    const mdata::Utf8Texts views(texts);
    check_given(views, given);
    std::vector<double> measures(views.size() * tx::kGopher);
    {
        const py::gil_scoped_release unlocked;
        std::vector<tx::Word> words;
        for (std::size_t number = 0; number < views.size(); ++number) {
            read_words(views[number], given, number, words);
            tx::gopher(views[number], words, stop_words, &measures[number * tx::kGopher]);
        }
    }
    return reshaped(std::move(measures), tx::kGopher);
}

py::array repetition(const py::list& texts, const Given& given) {
    const mdata::Utf8Texts views(texts);
    check_given(views, given);
    std::vector<double> measures(views.size() * tx::Repetition::kMeasures);
    {
        const py::gil_scoped_release unlocked;
        std::vector<tx::Word> words;
        tx::Repetition measurer;
        for (std::size_t number = 0; number < views.size(); ++number) {
            read_words(views[number], given, number, words);
            measurer.measure(views[number], words, &measures[number * tx::Repetition::kMeasures]);
        }
    }
    return reshaped(std::move(measures), tx::Repetition::kMeasures);
}

py::array fineweb(const py::list& texts, std::size_t short_line, const Given& given) {
    const mdata::Utf8Texts views(texts);
    check_given(views, given);
    std::vector<double> measures(views.size() * tx::kFineWeb);
    {
        const py::gil_scoped_release unlocked;
        std::vector<tx::Word> words;
        tx::Repetition measurer;
        for (std::size_t number = 0; number < views.size(); ++number) {
            read_words(views[number], given, number, words);
            tx::fineweb(views[number], words.size(), short_line, measurer, &measures[number * tx::kFineWeb]);
        }
    }
    return reshaped(std::move(measures), tx::kFineWeb);
}

// (the verdict of each text, the text without the lines that fall)
py::tuple c4(const py::list& texts, const tx::C4& rules) {
    const mdata::Utf8Texts views(texts);
    std::vector<std::uint8_t> verdicts(views.size());
    std::vector<std::string> kept(views.size());
    {
        const py::gil_scoped_release unlocked;
        for (std::size_t number = 0; number < views.size(); ++number)
            verdicts[number] = static_cast<std::uint8_t>(tx::c4(views[number], rules, kept[number]));
    }
    return py::make_tuple(mdata::as_array(std::move(verdicts)), kept);
}

template <typename Measure>
mdata::Int64s numbers_of(const py::list& texts, Measure measure) {
    const mdata::Utf8Texts views(texts);
    std::vector<std::int64_t> numbers;
    numbers.reserve(views.size());
    {
        const py::gil_scoped_release unlocked;
        for (const std::string_view text : views) numbers.push_back(static_cast<std::int64_t>(measure(text)));
    }
    return mdata::as_array(std::move(numbers));
}

std::vector<std::string> collapsed(const py::list& texts) {
    const mdata::Utf8Texts views(texts);
    std::vector<std::string> results;
    const py::gil_scoped_release unlocked;
    for (const std::string_view text : views) results.push_back(tx::collapsed(text));
    return results;
}

// [m, 4]: the number of the text, [begin, end) in characters, whether a line before has "<"
py::array doubtful_lines(const py::list& texts) {
    const mdata::Utf8Texts views(texts);
    std::vector<std::int64_t> rows;
    {
        const py::gil_scoped_release unlocked;
        std::vector<tx::Doubtful> runs;
        for (std::size_t number = 0; number < views.size(); ++number) {
            tx::doubtful_lines(views[number], runs);
            for (const auto& run : runs)
                rows.insert(rows.end(), {static_cast<std::int64_t>(number), static_cast<std::int64_t>(run.begin),
                                         static_cast<std::int64_t>(run.end), run.after_tag});
        }
    }
    const auto count = static_cast<py::ssize_t>(rows.size() / 4);
    return mdata::as_array(std::move(rows)).reshape({count, py::ssize_t{4}});
}

// [n, 2], the [begin, end) of each word in bytes
py::array word_spans(const py::str& text) {
    const std::string_view view = mdata::utf8_of(text);
    std::vector<std::int64_t> spans;
    {
        const py::gil_scoped_release unlocked;
        std::vector<tx::Word> words;
        tx::split_words(view, words);
        for (const auto& word : words) spans.insert(spans.end(), {word.begin, word.end});
    }
    const auto count = static_cast<py::ssize_t>(spans.size() / 2);
    return mdata::as_array(std::move(spans)).reshape({count, py::ssize_t{2}});
}

// (spans [m, 3]: text, [begin, end) in characters; items [k, 2]: text, item)
py::tuple match_ngrams(const tx::NgramIndex& index, const py::list& texts) {
    const mdata::Utf8Texts views(texts);
    std::vector<std::int64_t> spans, items;
    {
        const py::gil_scoped_release unlocked;
        tx::NgramIndex::Words words;
        tx::NgramIndex::Matches matches;
        std::vector<std::uint32_t> stamps;
        for (std::size_t number = 0; number < views.size(); ++number) {
            index.match(views[number], words, stamps, static_cast<std::uint32_t>(number + 1), matches);
            const auto text = static_cast<std::int64_t>(number);
            for (const auto& [begin, end] : matches.spans)
                spans.insert(spans.end(), {text, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end)});
            for (const std::uint32_t item : matches.items) items.insert(items.end(), {text, item});
        }
    }
    const auto num_spans = static_cast<py::ssize_t>(spans.size() / 3);
    const auto num_items = static_cast<py::ssize_t>(items.size() / 2);
    return py::make_tuple(mdata::as_array(std::move(spans)).reshape({num_spans, py::ssize_t{3}}),
                          mdata::as_array(std::move(items)).reshape({num_items, py::ssize_t{2}}));
}

// (words joined by newlines, where each begins in the text in lower case)
py::tuple openwebtext_words(const py::str& text) {
    const std::string_view view = mdata::utf8_of(text);
    std::string words;
    std::vector<std::int64_t> begins;
    {
        const py::gil_scoped_release unlocked;
        tx::openwebtext_words(view, words, begins);
    }
    return py::make_tuple(words, mdata::as_array(std::move(begins)));
}

}  // namespace

namespace mdata {

void bind_text_rules(py::module_& module) {
    module.def("text_classes_unicode", [] { return std::string(tx::kUnicode); });
    module.def("text_classes", [] { return as_array(std::vector<std::uint8_t>(tx::class_table())); });
    module.def("word_spans", &word_spans, py::arg("text"));
    module.def("gopher_measures", &gopher, py::arg("texts"), py::arg("stop_words"), py::arg("words") = py::none());
    module.def("repetition_measures", &repetition, py::arg("texts"), py::arg("words") = py::none());
    module.def("fineweb_measures", &fineweb, py::arg("texts"), py::arg("short_line"), py::arg("words") = py::none());
    module.def(
        "c4_lines",
        [](const py::list& texts, bool citations, bool stop_mark, std::int64_t min_sentences,
           std::int64_t min_line_words, std::int64_t max_word_characters, bool lorem_ipsum, bool javascript,
           bool curly_bracket, bool policy) {
            return c4(texts, {citations, stop_mark, min_sentences, min_line_words, max_word_characters, lorem_ipsum,
                              javascript, curly_bracket, policy});
        },
        py::arg("texts"), py::arg("citations"), py::arg("stop_mark"), py::arg("min_sentences"),
        py::arg("min_line_words"), py::arg("max_word_characters"), py::arg("lorem_ipsum"), py::arg("javascript"),
        py::arg("curly_bracket"), py::arg("policy"));
    module.def(
        "third_longest_lines", [](const py::list& texts) { return numbers_of(texts, tx::third_longest_line); },
        py::arg("texts"));
    module.def(
        "word_counts",
        [](const py::list& texts) {
            std::vector<tx::Word> words;
            return numbers_of(texts, [&](std::string_view text) {
                tx::split_words(text, words);
                return static_cast<std::size_t>(
                    std::count_if(words.begin(), words.end(), [](const tx::Word& word) { return !word.symbol; }));
            });
        },
        py::arg("texts"));
    module.def("collapsed", &collapsed, py::arg("texts"));
    py::class_<tx::NgramIndex>(module, "NgramIndex")
        .def(py::init([](const py::list& items, std::size_t most, std::size_t least) {
                 const Utf8Texts views(items);
                 const py::gil_scoped_release unlocked;
                 return std::make_unique<tx::NgramIndex>(views, most, least);
             }),
             py::arg("items"), py::arg("most"), py::arg("least"))
        .def("ngrams", &tx::NgramIndex::ngrams)
        .def("match", &match_ngrams, py::arg("texts"));
    module.def("openwebtext_words", &openwebtext_words, py::arg("text"));
    module.def("doubtful_lines", &doubtful_lines, py::arg("texts"));
}

}  // namespace mdata
