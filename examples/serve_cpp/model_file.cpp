#include "model_file.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_set>

#include "errors.h"

namespace serve {
namespace {

constexpr uint64_t kBuffer = 1 << 20;
constexpr uint64_t kLargestDirectory = 1 << 28;
constexpr uint64_t kLargestSmallRecord = 1 << 28;
constexpr uint64_t kLargestRatio = 1032;  // deflate makes nothing smaller than that

constexpr uint32_t kLocal = 0x04034b50, kEntry = 0x02014b50, kEnd = 0x06054b50;
constexpr uint32_t kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr uint64_t kLocalBytes = 30, kEntryBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocator64Bytes = 20;
constexpr uint16_t kStored = 0, kDeflated = 8, kEncrypted = 1, kZip64 = 1;

// A little-endian number.
template <typename Number>
Number number_at(const unsigned char* at) {
  Number found = 0;
  for (size_t byte = 0; byte < sizeof(Number); ++byte) {
    found = static_cast<Number>(found | static_cast<Number>(at[byte]) << (8 * byte));
  }
  return found;
}

// The fields of an entry that do not fit 32 bits are in its extra field, in this order. False if they are not.
bool read_zip64(Record& record, const unsigned char* extra, size_t bytes) {
  uint64_t* fields[] = {&record.size, &record.stored, &record.header};
  const auto is_elsewhere = [](const uint64_t* field) { return *field == UINT32_MAX; };
  if (std::none_of(std::begin(fields), std::end(fields), is_elsewhere)) {
    return true;
  }
  while (bytes >= 4) {
    const size_t length = number_at<uint16_t>(extra + 2);
    if (length > bytes - 4) {
      return false;
    }
    if (number_at<uint16_t>(extra) == kZip64) {
      size_t position = 4;
      for (uint64_t* field : fields) {
        if (!is_elsewhere(field)) {
          continue;
        }
        if (position + 8 > 4 + length) {
          return false;
        }
        *field = number_at<uint64_t>(extra + position);
        position += 8;
      }
      return true;
    }
    extra += 4 + length;
    bytes -= 4 + length;
  }
  return false;
}

}  // namespace

std::string hexadecimal(uint32_t number) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", number);
  return text;
}

FileStamp::FileStamp(const struct stat& found)
    : device(found.st_dev),
      inode(found.st_ino),
      size(static_cast<uint64_t>(found.st_size)),
      seconds(found.st_mtim.tv_sec),
      nanoseconds(found.st_mtim.tv_nsec) {}

FileStamp stamp_at(const std::string& path) {
  struct stat found;
  return ::stat(path.c_str(), &found) == 0 ? FileStamp(found) : FileStamp();
}

File::File(const std::string& path) : path_(path) {
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not wait
  struct stat found{};
  if (descriptor_ < 0) {
    const bool is_there = errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG && errno != ELOOP;
    throw FileError(path + " cannot be read: " + std::strerror(errno) + (is_there ? " [cannot_read]" : " [no_file]"));
  }
  if (::fstat(descriptor_, &found) != 0 || !S_ISREG(found.st_mode)) {
    ::close(descriptor_);
    throw FileError(path + " cannot be read: it is not a regular file [no_file]");
  }
  opened_ = FileStamp(found);
}

File::~File() { ::close(descriptor_); }

FileStamp File::stamp() const {
  struct stat found{};
  return ::fstat(descriptor_, &found) == 0 ? FileStamp(found) : FileStamp();
}

void File::read(uint64_t position, void* to, uint64_t bytes) const {
  char* target = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = ::pread(descriptor_, target, bytes, static_cast<off_t>(position));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      throw FileError(path_ + " cannot be read: " + std::strerror(errno) + " [cannot_read]");
    }
    if (got == 0) {
      check_unchanged();
      throw FileError(path_ + " cannot be loaded: it is cut off [damaged_file]");
    }
    target += got;
    position += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
}

void File::check_unchanged() const {
  if (stamp() != opened_) {
    throw FileError(path_ +
                    " was written to while it was being loaded; write another file and rename it [changed_file]");
  }
}

Archive::Archive(const File& file) : file_(file) {
  uint64_t begin = 0, size = 0, count = 0;
  find_directory(begin, size, count);
  directory_begin_ = begin;
  read_directory(begin, size, count);
}

void Archive::fail(const std::string& why) const {
  file_.check_unchanged();
  throw FileError(file_.path() + " cannot be loaded: " + why + " [damaged_file]");
}

std::vector<unsigned char> Archive::bytes(uint64_t position, uint64_t count) const {
  if (position > file_.size() || count > file_.size() - position) {
    fail("its directory points behind its end");
  }
  std::vector<unsigned char> found(count);
  file_.read(position, found.data(), count);
  return found;
}

void Archive::find_directory(uint64_t& begin, uint64_t& size, uint64_t& count) const {
  uint64_t position = file_.size() - std::min(file_.size(), kEndBytes);
  const std::vector<unsigned char> end = bytes(position, file_.size() - position);
  if (end.size() < kEndBytes || number_at<uint32_t>(end.data()) != kEnd || number_at<uint16_t>(end.data() + 20) != 0) {
    fail("it is cut off, or it is not a file of recfx.export");
  }
  count = number_at<uint16_t>(end.data() + 10);
  size = number_at<uint32_t>(end.data() + 12);
  begin = number_at<uint32_t>(end.data() + 16);
  if (position >= kLocator64Bytes) {
    const std::vector<unsigned char> locator = bytes(position - kLocator64Bytes, kLocator64Bytes);
    if (number_at<uint32_t>(locator.data()) == kLocator64) {
      position -= std::min(position, kLocator64Bytes + kEnd64Bytes);
      const std::vector<unsigned char> end64 = bytes(position, kEnd64Bytes);
      if (number_at<uint32_t>(end64.data()) != kEnd64 || number_at<uint64_t>(locator.data() + 8) != position) {
        fail("its directory is damaged");
      }
      count = number_at<uint64_t>(end64.data() + 32);
      size = number_at<uint64_t>(end64.data() + 40);
      begin = number_at<uint64_t>(end64.data() + 48);
    }
  }
  if (begin > position || size != position - begin) {
    fail("its directory is damaged");
  }
}

void Archive::read_directory(uint64_t begin, uint64_t size, uint64_t count) {
  if (size > kLargestDirectory || count > size / kEntryBytes) {
    fail("its directory is damaged");
  }
  const std::vector<unsigned char> directory = bytes(begin, size);
  std::unordered_set<std::string> names;
  uint64_t at = 0;
  for (; count > 0; --count) {
    const unsigned char* entry = directory.data() + at;
    if (size - at < kEntryBytes || number_at<uint32_t>(entry) != kEntry) {
      fail("its directory is damaged");
    }
    const uint64_t name = number_at<uint16_t>(entry + 28), extra = number_at<uint16_t>(entry + 30);
    const uint64_t whole = kEntryBytes + name + extra + number_at<uint16_t>(entry + 32);
    if (whole > size - at) {
      fail("its directory is damaged");
    }
    Record record;
    record.name.assign(reinterpret_cast<const char*>(entry) + kEntryBytes, name);
    record.method = number_at<uint16_t>(entry + 10);
    record.crc = number_at<uint32_t>(entry + 16);
    record.stored = number_at<uint32_t>(entry + 20);
    record.size = number_at<uint32_t>(entry + 24);
    record.header = number_at<uint32_t>(entry + 42);
    const bool is_encrypted = number_at<uint16_t>(entry + 8) & kEncrypted;
    if (is_encrypted || !read_zip64(record, entry + kEntryBytes + name, extra) || !names.insert(record.name).second) {
      fail("its directory is damaged");
    }
    records_.push_back(std::move(record));
    at += whole;
  }
  const auto is_first = [](const Record& record) { return record.header == 0; };
  if (at != size || std::none_of(records_.begin(), records_.end(), is_first)) {
    fail("its directory is damaged");
  }
}

const Record* Archive::find(const std::string& suffix) const {
  const Record* found = nullptr;
  for (const Record& record : records_) {
    if (record.name.ends_with(suffix)) {
      if (found != nullptr) {
        return nullptr;
      }
      found = &record;
    }
  }
  return found;
}

uint64_t Archive::content_begin(const Record& record) const {
  const std::vector<unsigned char> header = bytes(record.header, kLocalBytes);
  const uint64_t name = number_at<uint16_t>(header.data() + 26), extra = number_at<uint16_t>(header.data() + 28);
  const std::vector<unsigned char> named = bytes(record.header + kLocalBytes, name);
  if (number_at<uint32_t>(header.data()) != kLocal || number_at<uint16_t>(header.data() + 8) != record.method ||
      std::string(named.begin(), named.end()) != record.name) {
    fail("its record " + record.name + " is damaged");
  }
  const uint64_t begin = record.header + kLocalBytes + name + extra;
  if (begin > directory_begin_ || record.stored > directory_begin_ - begin) {
    fail("its record " + record.name + " does not fit into it");
  }
  return begin;
}

void Archive::stream(const Record& record, const Sink& sink) const {
  uint64_t position = content_begin(record);
  if (record.method == kDeflated) {
    if (record.size / kLargestRatio > record.stored) {
      fail("its record " + record.name + " is damaged");
    }
    inflate_record(record, position, sink);
    return;
  }
  if (record.method != kStored || record.size != record.stored) {
    fail("its record " + record.name + " is damaged");
  }
  std::vector<unsigned char> buffer(std::min(kBuffer, record.size));
  for (uint64_t left = record.size; left > 0;) {
    const uint64_t count = std::min<uint64_t>(left, buffer.size());
    file_.read(position, buffer.data(), count);
    sink(buffer.data(), count);
    position += count;
    left -= count;
  }
}

void Archive::inflate_record(const Record& record, uint64_t position, const Sink& sink) const {
  z_stream state{};
  if (inflateInit2(&state, -MAX_WBITS) != Z_OK) {
    throw std::bad_alloc();
  }
  const std::unique_ptr<z_stream, int (*)(z_stream*)> release(&state, inflateEnd);
  std::vector<unsigned char> in(std::min(kBuffer, record.stored)), out(kBuffer);
  uint64_t left = record.stored, written = 0;
  int status = Z_OK;
  while (status == Z_OK) {
    if (state.avail_in == 0) {
      const uint64_t count = std::min<uint64_t>(left, in.size());
      if (count > 0) {
        file_.read(position, in.data(), count);
      }
      position += count;
      left -= count;
      state.next_in = in.data();
      state.avail_in = static_cast<uInt>(count);
    }
    state.next_out = out.data();
    state.avail_out = static_cast<uInt>(out.size());
    status = inflate(&state, Z_NO_FLUSH);
    const size_t made = out.size() - state.avail_out;
    written += made;
    if (written > record.size) {
      break;
    }
    sink(out.data(), made);
  }
  if (status != Z_STREAM_END || written != record.size || left != 0 || state.avail_in != 0) {
    fail("its record " + record.name + " is damaged");
  }
}

void Archive::check() const {
  for (const Record& record : records_) {
    stream_checked(record, [](const unsigned char*, size_t) {});
  }
}

std::string Archive::read(const Record& record) const {
  if (record.size > kLargestSmallRecord) {
    fail("its record " + record.name + " is too large");
  }
  std::string found;
  stream_checked(record, [&found](const unsigned char* data, size_t count) {
    found.append(reinterpret_cast<const char*>(data), count);
  });
  return found;
}

void Archive::stream_checked(const Record& record, const Sink& sink) const {
  uLong crc = crc32(0, nullptr, 0);
  stream(record, [&](const unsigned char* data, size_t count) {
    crc = crc32_z(crc, data, count);
    sink(data, count);
  });
  if (crc != record.crc) {
    fail("its record " + record.name + " is damaged");
  }
}

uint32_t Archive::content_checksum(const std::string& manifest, const std::string& text) const {
  std::map<std::string, uint32_t> sorted;
  for (const Record& record : records_) {
    if (!record.name.ends_with(manifest) && !record.name.ends_with(".debug_pkl")) {
      sorted[record.name] = record.crc;
    }
  }
  const auto add = [](uLong crc, const std::string& bytes) {
    return crc32_z(crc, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  };
  uLong crc = add(crc32(0, nullptr, 0), text);
  for (const auto& [name, of_record] : sorted) {
    crc = add(crc, name + "\n" + hexadecimal(of_record) + "\n");
  }
  return static_cast<uint32_t>(crc);
}

std::string Archive::fingerprint() const {
  uLong crc = crc32(0, nullptr, 0);
  for (const Record& record : records_) {
    unsigned char little_endian[4];
    for (int byte = 0; byte < 4; ++byte) {
      little_endian[byte] = static_cast<unsigned char>(record.crc >> (8 * byte));
    }
    crc = crc32(crc, little_endian, sizeof(little_endian));
  }
  return hexadecimal(static_cast<uint32_t>(crc));
}

}  // namespace serve
