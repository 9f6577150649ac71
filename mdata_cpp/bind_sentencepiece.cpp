// Python bindings of sentencepiece.hpp (SentencePiece); documented in mdata/_core.pyi.
#include "bindings.hpp"
#include "sentencepiece.hpp"

namespace py = pybind11;
using namespace mdata;

namespace {

enum Kind : std::uint8_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

std::string folded(std::string_view text) {
    std::string out(text);
    sp::fold_blanks(out);
    return out;
}

sp::Facts facts_of(const py::list& pieces, const Array<float>& scores, std::string_view kinds, sp::TextRules rules) {
    const Utf8Texts texts(pieces);
    const auto values = view(scores);
    if (texts.size() != values.size() || texts.size() != kinds.size())
        throw std::invalid_argument("a score and a kind are expected for every piece");
    sp::Facts facts;
    for (std::size_t id = 0; id < texts.size(); ++id) {
        const std::string_view text = texts[id];
        const auto number = static_cast<std::int32_t>(id);
        if (text.empty()) throw std::invalid_argument("a piece is empty");
        if (kinds[id] == kUnknown) facts.unknown_id = number;
        if (kinds[id] == kUnused) throw std::invalid_argument("a model with unused pieces");
        if (kinds[id] == kByte) facts.byte_ids.push_back(number);
        if (kinds[id] == kUserDefined) rules.raw.emplace_back(text);
        // A prepared text has no blank but U+2581, so a piece with another one is never found in it.
        if (text.find(' ') != std::string_view::npos) continue;
        if (kinds[id] == kNormal) facts.pieces.push_back({folded(text), values[id], number});
        if (kinds[id] == kUserDefined) facts.user_pieces.push_back({folded(text), values[id], number});
    }
    if (!facts.byte_ids.empty()) {
        std::vector<std::int32_t> ordered(256, -1);
        for (const std::int32_t id : facts.byte_ids) {
            const std::string piece(texts[static_cast<std::size_t>(id)]);
            const unsigned long byte = piece.size() == 6 ? std::strtoul(piece.substr(3, 2).c_str(), nullptr, 16) : 256;
            if (byte > 255 || ordered[byte] >= 0) throw std::invalid_argument("no piece for a byte: " + piece);
            ordered[byte] = id;
        }
        if (facts.byte_ids.size() != 256) throw std::invalid_argument("256 pieces for bytes are expected");
        facts.byte_ids = std::move(ordered);
    }
    facts.rules = std::move(rules);
    return facts;
}

std::unique_ptr<sp::Encoder> make_encoder(const py::list& pieces, const Array<float>& scores, std::string_view kinds,
                                          std::string_view charsmap, bool add_dummy_prefix,
                                          bool remove_extra_whitespaces, bool whitespace_as_suffix) {
    return std::make_unique<sp::Encoder>(
        facts_of(pieces, scores, kinds,
                 {std::string(charsmap), {}, add_dummy_prefix, remove_extra_whitespaces, whitespace_as_suffix}));
}

py::tuple encode_texts(const sp::Encoder& encoder, const py::list& texts) {
    const Utf8Texts views(texts);
    Int64s lengths(static_cast<py::ssize_t>(views.size()));
    const auto out = mutable_view(lengths);
    std::vector<std::int32_t> ids;
    {
        const py::gil_scoped_release unlocked;
        ids = encoder.encode(views, out);
    }
    return py::make_tuple(as_array(std::move(ids)), lengths);
}

}  // namespace

void mdata::bind_sentencepiece(py::module_& module) {
    py::class_<sp::Encoder>(module, "SentencePiece")
        .def(py::init(&make_encoder), py::arg("pieces"), py::arg("scores").noconvert(), py::arg("kinds"), py::arg("charsmap"),
             py::arg("add_dummy_prefix"), py::arg("remove_extra_whitespaces"), py::arg("whitespace_as_suffix"))
        .def("encode", &encode_texts, py::arg("texts"));
}
