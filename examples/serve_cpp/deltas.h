// The folder that deltas are put into. This file does not use torch.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "model_file.h"
#include "versions.h"

namespace serve {

// Finds the delta that is applied next. Of each file that cannot be, or never will be, it says why on standard error,
// once per content; one whose parent is not served yet waits without a word. Hidden files are still being written.
class DeltaFolder {
 public:
  explicit DeltaFolder(std::string path) : path_(std::move(path)) {}

  // The first file by name that changes the version that is served; nothing if there is none.
  std::optional<std::string> next(const std::optional<Version>& served);

  // The file that `next` has returned was applied.
  void done(const std::string& path);

  // The file that `next` has returned cannot be applied; the message ends with a reason code.
  void refuse(const std::string& path, const std::string& why);

 private:
  struct Found {
    FileStamp stamp;
    bool is_read = false, is_done = false;  // done: nobody looks at this content again
    std::optional<Version> version;
    std::optional<Changes> delta;
    std::string said;  // the reason code
  };

  void list();
  static void read(const std::string& path, Found& file);
  static bool waits(const Found& file, const std::optional<Version>& served);

  const std::string path_;
  std::map<std::string, Found> files_;  // by path
  bool is_listed_ = true;
};

}  // namespace serve
