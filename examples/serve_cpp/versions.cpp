#include "versions.h"

#include "errors.h"

namespace serve {
namespace {

Members members_of(const Members& from, const std::string& name) {
  return TopLevel(member(from, name)).members().value_or(Members());
}

// Nothing if the text is neither a number nor a list of such texts.
std::optional<std::vector<int64_t>> numbers_in(const std::string& text) {
  if (!text.starts_with('[')) {
    const auto number = integer(text);
    return number ? std::optional(std::vector{*number}) : std::nullopt;
  }
  std::vector<int64_t> found;
  for (const std::string& item : TopLevel(text).items()) {
    const auto numbers = numbers_in(item);
    if (!numbers) {
      return std::nullopt;
    }
    found.insert(found.end(), numbers->begin(), numbers->end());
  }
  return found;
}

std::optional<Stretch> stretch_of(const Members& described) {
  const auto begin = integer(member(described, "begin")), count = integer(member(described, "count"));
  const auto unit = integer(member(described, "unit"));
  if (!begin || !count || !unit) {
    return std::nullopt;
  }
  return Stretch{member(described, "tensor"), *begin, *count, *unit, member(described, "which"),
                 member(described, "data")};
}

}  // namespace

std::optional<Version> version_of(const Members& manifest) {
  const auto number = integer(member(manifest, "number"));
  Version version{member(manifest, "version"), member(manifest, "chain"), number.value_or(0)};
  return number && !version.name.empty() && !version.chain.empty() ? std::optional(version) : std::nullopt;
}

std::optional<Changes> changes_of(const Members& manifest) {
  const Members described = members_of(manifest, "delta");
  Changes changes;
  changes.parent = member(described, "parent");
  if (changes.parent.empty()) {
    return std::nullopt;
  }
  for (const std::string& text : TopLevel(member(described, "stretches")).items()) {
    const auto stretch = stretch_of(TopLevel(text).members().value_or(Members()));
    if (!stretch) {
      return std::nullopt;
    }
    changes.stretches.push_back(*stretch);
  }
  const Members tensors = members_of(described, "tensors");
  for (const auto& [name, text] : tensors) {
    changes.tensors[name] = member(tensors, name);
  }
  for (const auto& [name, text] : members_of(described, "lists")) {
    for (const std::string& item : TopLevel(text).items()) {
      changes.lists[name].push_back(unquoted(item));
    }
  }
  const Members modules = members_of(described, "attributes");
  for (const auto& [module, text] : modules) {
    for (const auto& [name, value] : members_of(modules, module)) {
      const auto numbers = numbers_in(value);
      if (!numbers) {
        return std::nullopt;
      }
      changes.attributes[module + '.' + name] = *numbers;
    }
  }
  return changes;
}

void check_not_older(const std::string& path, const std::optional<Version>& base,
                     const std::optional<Version>& served) {
  if (base && served && base->chain == served->chain && base->number < served->number) {
    throw FileError(path + " is number " + std::to_string(base->number) + " of its chain; number " +
                    std::to_string(served->number) + " is served [older_version]");
  }
}

void check_follows(const std::string& path, const std::optional<Version>& version, const std::optional<Changes>& delta,
                   const std::optional<Version>& served) {
  if (!delta) {
    throw FileError(path + " is a whole file, not a delta [not_a_delta]");
  }
  if (!served || version->chain != served->chain) {
    throw FileError(path + " belongs to the chain of another base, " + version->chain.substr(0, 8) + "; " +
                    (served ? "chain " + served->chain.substr(0, 8) + " is served" : "what is served has no chain") +
                    " [delta_of_other_base]");
  }
  if (delta->parent != served->name) {
    throw FileError(path + " is number " + std::to_string(version->number) + " of its chain, and follows version " +
                    delta->parent.substr(0, 8) + "; version " + served->name.substr(0, 8) + ", number " +
                    std::to_string(served->number) + ", is served [delta_out_of_order]");
  }
}

}  // namespace serve
