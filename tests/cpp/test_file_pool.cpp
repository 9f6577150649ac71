// The pool of open files: reads equal the content whatever was closed, the bound holds, another file is refused.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "check.hpp"
#include "file_pool.hpp"
#include "forks.hpp"

namespace {

using mdata::FilePool;
using mdata::PooledFile;

constexpr std::size_t kBytes = 5000;

std::byte byte_of(std::size_t file, std::size_t at) { return static_cast<std::byte>(file * 7 + at * 13 + at / 251); }

void write(const std::string& path, std::size_t file) {
    std::ofstream out(path, std::ios::binary);
    for (std::size_t at = 0; at < kBytes; ++at) out.put(static_cast<char>(byte_of(file, at)));
}

// Files of one pool in a folder of their own, both gone with the object.
class Folder {
public:
    Folder(std::size_t files, std::size_t most) : pool(std::make_shared<FilePool>(most)) {
        std::string name = std::filesystem::temp_directory_path() / "mdata-pool-XXXXXX";
        CHECK(::mkdtemp(name.data()) != nullptr);
        path_ = name;
        for (std::size_t number = 0; number < files; ++number) {
            write(path(number), number);
            struct stat facts {};
            CHECK(::stat(path(number).c_str(), &facts) == 0);
            this->files.push_back(std::make_unique<PooledFile>(pool, path(number), mdata::identity_of(facts)));
        }
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    ~Folder() { std::filesystem::remove_all(path_); }

    std::string path(std::size_t number) const { return path_ / std::to_string(number); }

    // How many of `reads` random reads gave other bytes than were written.
    std::size_t wrong(unsigned seed, std::size_t reads) const {
        std::mt19937 random(seed);
        std::vector<std::byte> into(700);
        std::size_t found = 0;
        for (std::size_t i = 0; i < reads; ++i) {
            const std::size_t number = random() % files.size();
            const std::size_t at = random() % kBytes;
            const std::size_t got = files[number]->use()->read(into, static_cast<std::int64_t>(at));
            bool same = got == std::min(into.size(), kBytes - at);
            for (std::size_t j = 0; j < got; ++j) same = same && into[j] == byte_of(number, at + j);
            found += same ? 0 : 1;
        }
        return found;
    }

    int error_of(std::size_t number) const {
        try {
            (void)files[number]->use();
        } catch (const std::system_error& error) {
            return error.code().value();
        }
        return 0;
    }

    const std::shared_ptr<FilePool> pool;
    std::vector<std::unique_ptr<PooledFile>> files;

private:
    std::filesystem::path path_;
};

std::size_t descriptors() {
    std::size_t found = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++found, (void)entry;
    return found;
}

void threads_read_right_by_two_open_files() {
    const std::size_t before = descriptors();
    {
        const Folder folder(20, 2);
        std::atomic<std::size_t> wrong = 0, most = 0;
        {
            std::vector<std::jthread> threads;
            for (unsigned seed = 0; seed < 4; ++seed) {
                threads.emplace_back([&, seed] { wrong += folder.wrong(seed, 2000); });
            }
            for (int i = 0; i < 100; ++i) most = std::max<std::size_t>(most, descriptors());
        }
        CHECK(wrong == 0);
        CHECK(most <= before + 2 + 2 * 4);  // a thread holds the file that it reads and, for a moment, one that it closes
        CHECK(folder.pool->num_open() == 2);
        CHECK(descriptors() == before + 2);
    }
    CHECK(descriptors() == before);
}

void a_share_outlives_its_place_in_the_pool() {
    const Folder folder(3, 1);
    const auto held = folder.files[0]->use();
    (void)folder.files[1]->use();
    CHECK(folder.pool->num_open() == 1);
    std::byte one{};
    CHECK(held->read({&one, 1}, 17) == 1 && one == byte_of(0, 17));
    CHECK(folder.files[0]->use() != held);
}

void a_file_that_goes_leaves_the_pool() {
    Folder folder(3, 2);
    (void)folder.files[0]->use();
    (void)folder.files[1]->use();
    folder.files.erase(folder.files.begin());
    CHECK(folder.pool->num_open() == 1);
    (void)folder.files[1]->use();
    CHECK(folder.pool->num_open() == 2);
}

void another_file_of_the_name_is_refused() {
    const Folder folder(5, 1);
    CHECK(folder.error_of(0) == 0 && folder.error_of(4) == 0);
    write(folder.path(0) + ".new", 0);
    std::filesystem::rename(folder.path(0) + ".new", folder.path(0));
    CHECK(folder.error_of(0) == ESTALE);
    write(folder.path(1), 1);  // in place, of the same size
    CHECK(folder.error_of(1) == ESTALE);
    CHECK(::truncate(folder.path(2).c_str(), 4000) == 0);
    CHECK(folder.error_of(2) == ESTALE);
    std::filesystem::remove(folder.path(3));
    CHECK(folder.error_of(3) == ENOENT);
    CHECK(folder.error_of(4) == 0);
}

void a_child_reads_whatever_its_parents_threads_did() {
    const Folder folder(20, 2);
    const auto reads_right = [&] { return folder.wrong(9, 50) == 0; };
    CHECK(check::in_children(60, reads_right, reads_right));
}

void where_descriptors_run_out_the_pool_gives_up_its_own() {
    const Folder folder(60, 1000);
    struct rlimit limit {};
    CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
    const rlimit tight{static_cast<rlim_t>(descriptors() + 20), limit.rlim_max};
    CHECK(::setrlimit(RLIMIT_NOFILE, &tight) == 0);
    CHECK(folder.wrong(1, 500) == 0);
    CHECK(folder.pool->num_open() > 0 && folder.pool->num_open() < 30);
    CHECK(FilePool().most() == tight.rlim_cur / 4);
    CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

}  // namespace

int main() {
    threads_read_right_by_two_open_files();
    a_share_outlives_its_place_in_the_pool();
    a_file_that_goes_leaves_the_pool();
    another_file_of_the_name_is_refused();
    a_child_reads_whatever_its_parents_threads_did();
    where_descriptors_run_out_the_pool_gives_up_its_own();
    return check::finish("file_pool");
}
