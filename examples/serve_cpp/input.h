// Where requests are read from, until it ends or a signal ends it. This file does not use torch.
#pragma once

#include <array>
#include <streambuf>
#include <string>

namespace serve {

// Make sure that no file is opened in the place of a standard stream that whoever started this process has closed.
void check_standard_streams();

// From now on, SIGTERM and SIGINT end all inputs: what was read is still answered. A second signal ends the process.
void stop_reading_at_signals();

// A file, a pipe, or standard input for "-". Throws a FileError, also while it is read.
class Input : public std::streambuf {
 public:
  explicit Input(const std::string& path);
  ~Input() override;
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;

 protected:
  int_type underflow() override;

 private:
  [[noreturn]] void fail() const;

  std::string path_;
  int descriptor_ = 0;
  std::array<char, 1 << 16> buffer_;
};

}  // namespace serve
