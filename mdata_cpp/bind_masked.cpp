// Python bindings of mapping.hpp, masking.hpp, masked_samples.hpp and masked_rows.hpp; documented in mdata/_core.pyi.
#include <array>
#include <optional>

#include "bindings.hpp"
#include "mapping.hpp"
#include "masked_rows.hpp"
#include "masked_samples.hpp"

namespace {

namespace py = pybind11;
using mdata::Int32s;
using mdata::Int64s;
using mdata::BertForm;
using mdata::MappingRule;
using mdata::MaskRule;
using mdata::MaskVocabulary;
using mdata::T5Form;
using mdata::view;

template <typename T>
py::object as_rows(std::vector<mdata::MappingRow<T>>&& rows) {
    static_assert(sizeof(mdata::MappingRow<T>) == 3 * sizeof(T));
    auto kept = std::make_unique<std::vector<mdata::MappingRow<T>>>(std::move(rows));
    const auto shape = std::vector<py::ssize_t>{static_cast<py::ssize_t>(kept->size()), 3};
    auto* data = reinterpret_cast<T*>(kept->data());
    using Kept = std::vector<mdata::MappingRow<T>>;
    const py::capsule owner(kept.release(), [](void* p) { delete static_cast<Kept*>(p); });
    return mdata::Array<T>(shape, data, owner);
}

MappingRule checked(std::int64_t longest, std::uint64_t short_ratio, std::int64_t least_sentences) {
    if (longest < 2 || longest > 0x7FFFFFFF || least_sentences < 1) {
        throw std::invalid_argument("a target below 2 or above 2^31 - 1, or samples of no sentence");
    }
    return {longest, short_ratio, least_sentences};
}

// Rows of 32 bits, or of 64 where sentences need them.
template <typename Map>
py::object mapped(const Int32s& sizes, Map&& map) {
    const auto run = [&]<typename T>(T) {
        std::vector<mdata::MappingRow<T>> rows;
        {
            const py::gil_scoped_release unlocked;
            rows = map(T{});
        }
        return as_rows(std::move(rows));
    };
    return view(sizes).size() > 0xFFFFFFFFU ? run(std::uint64_t{}) : run(std::uint32_t{});
}

py::object in_megatrons_form(const Int64s& boundaries, const Int32s& sizes, std::int64_t longest,
                            std::uint64_t short_ratio, std::int64_t least_sentences, std::uint64_t epochs,
                            std::uint64_t limit, std::uint32_t seed) {
    const MappingRule rule = checked(longest, short_ratio, least_sentences);
    return mapped(sizes, [&, documents = view(boundaries), inside = view(sizes)]<typename T>(T) {
        return mdata::megatron_mapping<T>(rule, documents, inside, epochs, limit, seed);
    });
}

py::object in_keyed_form(const Int64s& boundaries, const Int32s& sizes, std::int64_t longest, std::uint64_t short_ratio,
                         std::int64_t least_sentences, std::uint64_t key_low, std::uint64_t key_high,
                         std::uint64_t first_document) {
    const MappingRule rule = checked(longest, short_ratio, least_sentences);
    return mapped(sizes, [&, documents = view(boundaries), inside = view(sizes)]<typename T>(T) {
        return mdata::keyed_mapping<T>(rule, documents, inside, {key_low, key_high}, first_document);
    });
}

// Where a sample's draws come from: Megatron's generator for each, or a stream under a key.
struct MegatronDraws {
    std::uint32_t seed;
    mdata::Mersenne at(std::int64_t number) const {
        return mdata::Mersenne(static_cast<std::uint32_t>(seed + static_cast<std::uint64_t>(number)));
    }
};
struct KeyedDraws {
    mdata::Key128 key;
    mdata::KeyedStream at(std::int64_t number) const { return {key, static_cast<std::uint64_t>(number)}; }
};

// The arrays that rows are views of, kept alive with them.
class Rows : public mdata::MaskedRows {
public:
    Rows(const Int64s& numbers, const Int64s& targets, const Int64s& ends, const Int32s& sizes, const Int64s& tokens)
        : MaskedRows(view(numbers), view(targets), view(ends), view(sizes), view(tokens)),
          kept_{numbers, targets, ends, tokens}, kept_sizes_(sizes) {}

private:
    std::array<Int64s, 4> kept_;
    Int32s kept_sizes_;
};

// The arrays that are written: each of `width` cells for a row.
class Fields {
public:
    explicit Fields(const py::list& arrays, std::size_t rows, std::initializer_list<std::int64_t> widths) : widths_(widths) {
        if (arrays.size() != widths_.size()) throw std::invalid_argument("another number of fields");
        for (std::size_t f = 0; f < widths_.size(); ++f) {
            if (!py::isinstance<Int64s>(arrays[f])) throw py::type_error("a field is no contiguous array of int64");
            auto array = py::reinterpret_borrow<Int64s>(arrays[f]);
            const auto cells = mdata::mutable_view(array);
            if (cells.size() != rows * static_cast<std::size_t>(widths_[f])) throw std::invalid_argument("a field of another size");
            cells_.push_back(cells);
        }
    }

    mdata::Field row(std::size_t field, std::size_t i) const {
        const auto width = static_cast<std::size_t>(widths_[field]);
        return cells_[field].subspan(i * width, width);
    }

private:
    std::vector<std::int64_t> widths_;
    std::vector<std::span<std::int64_t>> cells_;
};

template <typename Draws>
void bert_samples(const BertForm& form, const MaskVocabulary& vocabulary, const MaskRule& rule, const Draws& draws,
                  const Rows& rows, const py::list& fields) {
    const std::int64_t q = form.length;
    const Fields out(fields, rows.size(), {q, q, q, 1, q, q, 1});
    const py::gil_scoped_release unlocked;
    mdata::BertSampler sampler(form, vocabulary, rule);
    rows.each([&](std::size_t i, std::int64_t number, const mdata::SampleText& text) {
        auto generator = draws.at(number);
        sampler.sample(text, generator,
                       {out.row(0, i), out.row(1, i), out.row(2, i), out.row(4, i), out.row(5, i),
                        out.row(3, i).data(), out.row(6, i).data()});
        return true;
    });
}

template <typename Draws>
py::object t5_samples(const T5Form& form, const MaskVocabulary& vocabulary, const MaskRule& rule, const Draws& draws,
                      const Rows& rows, const py::list& fields) {
    const std::int64_t e = form.encoder_length;
    const std::int64_t d = form.decoder_length;
    const Fields out(fields, rows.size(), {e, d, d, d, 1, e, d});
    mdata::T5Sampler sampler(form, vocabulary, rule);
    std::optional<std::size_t> failed;
    {
        const py::gil_scoped_release unlocked;
        failed = rows.each([&](std::size_t i, std::int64_t number, const mdata::SampleText& text) {
            auto generator = draws.at(number);
            return sampler.sample(text, generator,
                                  {out.row(0, i), out.row(1, i), out.row(2, i), out.row(3, i), out.row(5, i),
                                   out.row(6, i), out.row(4, i).data()});
        });
    }
    if (!failed) return py::none();
    return py::make_tuple(*failed, sampler.spans(), sampler.cells());
}

template <typename Draws>
void def_samples(py::module_& module) {
    module.def("bert_samples", &bert_samples<Draws>, py::arg("form"), py::arg("vocabulary"), py::arg("rule"),
               py::arg("draws"), py::arg("rows"), py::arg("fields"));
    module.def("t5_samples", &t5_samples<Draws>, py::arg("form"), py::arg("vocabulary"), py::arg("rule"),
               py::arg("draws"), py::arg("rows"), py::arg("fields"));
}

std::vector<std::int64_t> as_vector(const Int64s& array) { return {view(array).begin(), view(array).end()}; }

BertForm make_bert_form(std::int64_t length, bool head, std::int64_t pad, bool by_value) {
    if (length < 5 || length > 0x7FFFFFFF) throw std::invalid_argument("a length outside of 5 to 2^31 - 1");
    return {length, head, {pad, by_value}};
}

T5Form make_t5_form(std::int64_t encoder_length, std::int64_t decoder_length, std::int64_t bos, std::int64_t eos,
                    const Int64s& sentinels, std::int64_t pad, bool by_value) {
    if (encoder_length < 4 || encoder_length > 0x7FFFFFFF || decoder_length < 1 || decoder_length > 0x7FFFFFFF) {
        throw std::invalid_argument("lengths outside of 4 and 1 to 2^31 - 1");
    }
    return {encoder_length, decoder_length, bos, eos, as_vector(sentinels), {pad, by_value}};
}

MaskVocabulary make_vocabulary(std::int64_t cls, std::int64_t sep, std::int64_t mask,
                               const mdata::Array<std::uint8_t>& continues, const Int64s& ids) {
    if (view(ids).empty()) throw std::invalid_argument("a vocabulary without ids");
    return {cls, sep, mask, {view(continues).begin(), view(continues).end()}, as_vector(ids)};
}

void bind_forms(py::module_& module) {
    py::class_<MaskVocabulary>(module, "MaskVocabulary")
        .def(py::init(&make_vocabulary), py::arg("cls"), py::arg("sep"), py::arg("mask"),
             py::arg("continues").noconvert(), py::arg("ids").noconvert());
    py::class_<MaskRule>(module, "MaskRule")
        .def(py::init<double, std::int64_t, bool, bool, bool, bool>(), py::arg("probability"), py::arg("most_ngram"),
             py::arg("whole_words"), py::arg("longer"), py::arg("geometric"), py::arg("permute"))
        .def("bounds", [](const MaskRule& self) { return mdata::as_array(std::vector<double>(self.bounds)); });
    py::class_<BertForm>(module, "BertForm")
        .def(py::init(&make_bert_form), py::arg("length"), py::arg("head"), py::arg("pad"), py::arg("by_value"));
    py::class_<T5Form>(module, "T5Form")
        .def(py::init(&make_t5_form), py::arg("encoder_length"), py::arg("decoder_length"), py::arg("bos"),
             py::arg("eos"), py::arg("sentinels").noconvert(), py::arg("pad"), py::arg("by_value"));
    py::class_<MegatronDraws>(module, "MegatronDraws")
        .def(py::init([](std::uint32_t seed) { return MegatronDraws{seed}; }), py::arg("seed"));
    py::class_<KeyedDraws>(module, "KeyedDraws")
        .def(py::init([](std::uint64_t low, std::uint64_t high) { return KeyedDraws{{low, high}}; }),
             py::arg("key_low"), py::arg("key_high"));
    py::class_<Rows>(module, "MaskedRows")
        .def(py::init<const Int64s&, const Int64s&, const Int64s&, const Int32s&, const Int64s&>(),
             py::arg("numbers").noconvert(), py::arg("targets").noconvert(), py::arg("ends").noconvert(),
             py::arg("sizes").noconvert(), py::arg("tokens").noconvert());
}

}  // namespace

void mdata::bind_masked(py::module_& module) {
    bind_forms(module);
    def_samples<MegatronDraws>(module);
    def_samples<KeyedDraws>(module);
    module.def("megatron_mapping", &in_megatrons_form, py::arg("boundaries").noconvert(), py::arg("sizes").noconvert(),
               py::arg("longest"), py::arg("short_ratio"), py::arg("least_sentences"), py::arg("epochs"),
               py::arg("limit"), py::arg("seed"));
    module.def("keyed_mapping", &in_keyed_form, py::arg("boundaries").noconvert(), py::arg("sizes").noconvert(),
               py::arg("longest"), py::arg("short_ratio"), py::arg("least_sentences"), py::arg("key_low"),
               py::arg("key_high"), py::arg("first_document"));
}
