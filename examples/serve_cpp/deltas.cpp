#include "deltas.h"

#include <cstdio>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include "errors.h"
#include "manifest.h"

namespace serve {

std::optional<std::string> DeltaFolder::next(const std::optional<Version>& served) {
  list();
  for (auto& [path, file] : files_) {
    if (file.is_done) {
      continue;
    }
    try {
      read(path, file);
      if (served && file.delta && file.version->name == served->name) {  // a copy of it, or it is in the base
        file.is_done = true;
      } else if (!waits(file, served)) {
        check_follows(path, file.version, file.delta, served);
        return path;
      }
    } catch (const FileError& error) {
      refuse(path, error.what());
    } catch (const std::bad_alloc&) {
      refuse(path, "there is too little memory to read " + path + " [out_of_memory]");
    }
  }
  return std::nullopt;
}

void DeltaFolder::done(const std::string& path) { files_[path].is_done = true; }

void DeltaFolder::refuse(const std::string& path, const std::string& why) {
  Found& file = files_[path];
  const std::string reason = why.substr(why.rfind('[') + 1);  // npos + 1 is 0
  if (reason != file.said) {
    std::fprintf(stderr, "not applied\t%s\n", why.c_str());
    file.said = reason;
  }
  file.is_done = true;
  for (const char* passing : {"delta_of_other_base]", "delta_out_of_order]", "cannot_read]", "out_of_memory]"}) {
    file.is_done &= reason != passing;  // another base may come, or memory
  }
}

// Files that are new or have changed are read again; those that are gone are forgotten.
void DeltaFolder::list() {
  std::map<std::string, Found> listed;
  std::error_code error, of_entry;
  std::filesystem::directory_iterator entry(path_, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string path = entry->path().string();
    if (entry->path().filename().string().starts_with('.') || !entry->is_regular_file(of_entry)) {
      continue;
    }
    listed[path].stamp = stamp_at(path);
  }
  if (error && is_listed_) {
    std::fprintf(stderr, "not applied\t%s cannot be read: %s [cannot_read]\n", path_.c_str(), error.message().c_str());
  }
  is_listed_ = !error;
  if (error) {
    return;
  }
  for (auto& [path, file] : listed) {
    const auto known = files_.find(path);
    if (known != files_.end() && known->second.stamp == file.stamp) {
      file = std::move(known->second);
    }
  }
  files_ = std::move(listed);
}

// The manifest alone: the other records are compared with their checksums when it is applied.
void DeltaFolder::read(const std::string& path, Found& file) {
  if (!file.is_read) {
    const File opened(path);
    Manifest manifest = check_manifest(path, Archive(opened));
    file.version = std::move(manifest.version);
    file.delta = std::move(manifest.delta);
    file.is_read = true;
  }
}

// Whether its turn may come, when the deltas between what is served and this one are there.
bool DeltaFolder::waits(const Found& file, const std::optional<Version>& served) {
  return served && file.delta && file.version->chain == served->chain && file.version->number > served->number &&
         file.delta->parent != served->name;
}

}  // namespace serve
