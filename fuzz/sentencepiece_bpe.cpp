// SentencePiece's BPE (mdata_cpp/sentencepiece.hpp) with any rules, any pieces and any bytes of text.
//
// The first byte holds flags, the second says how many pieces follow (a length, a score, a kind, bytes), the third how
// many units the rules of normalization have, mostly small ones; the rest is text. What is encoded twice, or with the
// text's other half before it, must come out the same; ids stand for all bytes of the prepared text where bytes fall
// back to themselves. That ids are the library's is tested from Python.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "input.hpp"
#include "sentencepiece.hpp"

namespace {

namespace sp = mdata::sp;

std::string rules_of(ByteSource& in, std::size_t count) {
    std::vector<std::uint32_t> units(count);
    for (std::uint32_t& unit : units) {
        // A label, whether it is or has a leaf, a small offset; or four bytes of any kind.
        const std::uint32_t first = in.byte(), second = in.byte();
        unit = first | (second & 1) << 8 | (second & 0x7E) << 9 | (second & 0x80) << 24;
        if (second == 0x7F)
            for (int shift = 0; shift < 32; shift += 8) unit ^= std::uint32_t{in.byte()} << shift;
    }
    const auto bytes = static_cast<std::uint32_t>(4 * count);
    std::string out(reinterpret_cast<const char*>(&bytes), 4);
    out.append(reinterpret_cast<const char*>(units.data()), bytes);
    return out + in.text(8);
}

std::vector<std::int32_t> encoded(sp::BpeEncoder& encoder, std::string_view text) {
    sp::Ids ids;
    encoder.encode(text, ids);
    return {ids.data(), ids.data() + ids.size()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    ByteSource in(data, size);
    const std::uint8_t flags = in.byte(), num_pieces = in.byte() % 32, num_units = in.byte();
    sp::Facts facts;
    std::map<std::int32_t, std::string> texts;
    std::map<std::string, bool> known;
    for (std::int32_t id = 256; id < 256 + num_pieces; ++id) {
        const std::uint8_t form = in.byte();
        std::string text = in.text(1 + form % 6);
        std::replace(text.begin(), text.end(), '_', ' ');
        if (text.empty() || !known.emplace(text, true).second) continue;
        texts[id] = text;
        auto& pieces = form >= 0xE0 ? facts.user_pieces : facts.pieces;
        pieces.push_back({text, static_cast<float>(form >> 4 & 3), id});
        if (form >= 0xE0) facts.rules.raw.push_back(text);
    }
    const bool fallback = flags & 1;
    for (std::int32_t byte = 0; fallback && byte < 256; ++byte) facts.byte_ids.push_back(byte);
    facts.rules.dummy_prefix = flags & 2;
    facts.rules.remove_extra_blanks = flags & 4;
    facts.rules.blank_as_suffix = flags & 8;
    if (flags & 16) facts.rules.charsmap = rules_of(in, 1 + num_units);
    const std::string text = in.text(4096);

    try {
        sp::Charsmap rules(facts.rules.charsmap);
    } catch (const std::invalid_argument&) {
        return 0;
    }
    std::string prepared, back;
    sp::Preparer(facts.rules).prepare(text, prepared);
    sp::BpeEncoder encoder(std::make_shared<const sp::Model>(facts), 2);
    const std::vector<std::int32_t> ids = encoded(encoder, text);
    encoded(encoder, text.substr(text.size() / 2));
    REQUIRE(encoded(encoder, text) == ids);
    REQUIRE(fallback || ids.size() <= prepared.size());
    if (!fallback) return 0;
    for (const std::int32_t id : ids) back += id < 256 ? std::string(1, static_cast<char>(id)) : texts.at(id);
    sp::fold_blanks(back);
    sp::fold_blanks(prepared);
    REQUIRE(back == prepared);
    return 0;
}
