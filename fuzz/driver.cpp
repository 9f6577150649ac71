// A plain stand-in for libFuzzer's main, for machines with gcc only: mutates corpus files at random, without coverage.
//
// Takes -max_total_time=S, -seed=N, -artifact_prefix=P, files and folders; other options are ignored. An input that ends in
// a sanitizer's report or an abort is written to P followed by "crash". Without a time each file is run once.
#include <sanitizer/common_interface_defs.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes current;
std::string artifact_prefix = "./";

void save_current() {
    const std::string path = artifact_prefix + "crash";
    if (std::FILE* file = std::fopen(path.c_str(), "wb")) {
        std::fwrite(current.data(), 1, current.size(), file);
        std::fclose(file);
        std::fprintf(stderr, "input written to %s\n", path.c_str());
    }
}

void on_abort(int) {
    save_current();
    std::_Exit(77);
}

Bytes mutated(const std::vector<Bytes>& corpus, std::mt19937_64& random) {
    static constexpr std::uint8_t kTelling[] = {0, 1, 2, 4, 8, 127, 128, 252, 253, 254, 255};
    Bytes bytes = corpus[random() % corpus.size()];
    for (std::uint64_t round = 1 + random() % 6; round > 0; --round) {
        const std::size_t place = bytes.empty() ? 0 : random() % bytes.size();
        switch (random() % 5) {
            case 0: bytes.insert(bytes.begin() + place, static_cast<std::uint8_t>(random())); break;
            case 1: if (!bytes.empty()) bytes.erase(bytes.begin() + place); break;
            case 2: if (!bytes.empty()) bytes[place] ^= static_cast<std::uint8_t>(1u << random() % 8); break;
            case 3: if (!bytes.empty()) bytes[place] = kTelling[random() % std::size(kTelling)]; break;
            case 4: {
                const Bytes& other = corpus[random() % corpus.size()];
                const std::size_t from = other.empty() ? 0 : random() % other.size();
                bytes.resize(place);
                bytes.insert(bytes.end(), other.begin() + from, other.end());
            }
        }
    }
    bytes.resize(std::min<std::size_t>(bytes.size(), 4096));
    return bytes;
}

void run(Bytes bytes) {
    current = std::move(bytes);
    LLVMFuzzerTestOneInput(current.data(), current.size());
}

}  // namespace

int main(int argc, char** argv) {
    double seconds = 0;
    std::uint64_t seed = 1;
    std::vector<Bytes> corpus;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        const auto value = word.substr(word.find('=') + 1);
        if (word.starts_with("-max_total_time=")) seconds = std::stod(value);
        else if (word.starts_with("-seed=")) seed = std::stoull(value);
        else if (word.starts_with("-artifact_prefix=")) artifact_prefix = value;
        if (word.starts_with("-")) continue;
        std::vector<std::filesystem::path> files{word};
        if (std::filesystem::is_directory(word)) {
            files.assign(std::filesystem::directory_iterator(word), std::filesystem::directory_iterator());
        }
        for (const auto& path : files) {
            std::ifstream file(path, std::ios::binary);
            corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        }
    }
    __sanitizer_set_death_callback(save_current);
    std::signal(SIGABRT, on_abort);
    for (const Bytes& bytes : corpus) run(bytes);
    corpus.emplace_back();
    std::mt19937_64 random(seed);
    std::uint64_t count = corpus.size();
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (std::chrono::steady_clock::now() < end) {
        for (int i = 0; i < 1000; ++i, ++count) run(mutated(corpus, random));
    }
    std::fprintf(stderr, "Done %llu runs\n", static_cast<unsigned long long>(count));
}
