// The file of an exported model, checked before torch reads it: torch itself does not compare checksums.
// This file does not use torch.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace serve {

// Eight hexadecimal digits.
std::string hexadecimal(uint32_t number);

// What tells one file at a path from a later one at the same path.
struct FileStamp {
  uint64_t device = 0, inode = 0, size = 0;
  int64_t seconds = 0, nanoseconds = 0;

  explicit FileStamp(const struct stat& found);
  FileStamp() = default;
  bool operator==(const FileStamp&) const = default;
};

// The stamp of the file that is at a path now; that of no file if there is none.
FileStamp stamp_at(const std::string& path);

// A file that stays open, so that what was checked is what is loaded, even if another file takes its place meanwhile.
class File {
 public:
  explicit File(const std::string& path);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return opened_.size; }
  FileStamp stamp() const;

  // Read exactly `bytes` bytes.
  void read(uint64_t position, void* to, uint64_t bytes) const;

  // Throw a FileError if somebody has written to the file since it was opened.
  void check_unchanged() const;

 private:
  std::string path_;
  int descriptor_ = -1;
  FileStamp opened_;
};

// A record of the zip archive that a TorchScript file is.
struct Record {
  std::string name;
  uint64_t header = 0;  // where its local header begins
  uint64_t stored = 0;  // bytes in the file
  uint64_t size = 0;    // bytes of the content
  uint32_t crc = 0;
  uint16_t method = 0;
};

// The archive in a file.
class Archive {
 public:
  // Reads the directory of the archive.
  explicit Archive(const File& file);

  const std::vector<Record>& records() const { return records_; }

  // The record whose name ends with `suffix`; null if there is none, or more than one.
  const Record* find(const std::string& suffix) const;

  // Compare the content of every record with its checksum, in constant memory.
  void check() const;

  // The content of one small record, if it is that of its checksum.
  std::string read(const Record& record) const;

  // The CRC-32 of the names and checksums of all records but the one whose name ends with `manifest`, and of `text`,
  // which stands for that one; without TorchScript's debug records. See content_checksum in
  // recfx/exporter/model_file.py.
  uint32_t content_checksum(const std::string& manifest, const std::string& text) const;

  // Eight hexadecimal digits that tell one content from another: the CRC-32 of all records' CRC-32s.
  std::string fingerprint() const;

 private:
  using Sink = std::function<void(const unsigned char*, size_t)>;

  [[noreturn]] void fail(const std::string& why) const;
  std::vector<unsigned char> bytes(uint64_t position, uint64_t count) const;
  void find_directory(uint64_t& begin, uint64_t& size, uint64_t& count) const;
  void read_directory(uint64_t begin, uint64_t size, uint64_t count);
  uint64_t content_begin(const Record& record) const;
  void stream(const Record& record, const Sink& sink) const;
  void stream_checked(const Record& record, const Sink& sink) const;
  void inflate_record(const Record& record, uint64_t position, const Sink& sink) const;

  const File& file_;
  uint64_t directory_begin_ = 0;
  std::vector<Record> records_;
};

}  // namespace serve
