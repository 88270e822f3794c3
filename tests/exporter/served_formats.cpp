// Reads model files and requests as the server does, without torch, so that it is quickly compiled with sanitizers:
// what comes from outside the process is taken apart here. Each argument is a model file; requests are read from
// standard input.

#include <cstdio>

#include "errors.h"
#include "input.h"
#include "manifest.h"
#include "model_file.h"
#include "requests.h"

int main(int count, char** arguments) {
  for (int each = 1; each < count; ++each) {
    try {
      const serve::File file(arguments[each]);
      const serve::Archive archive(file);
      archive.check();
      serve::check_manifest(arguments[each], archive);
      std::printf("ok\t%s\t%s\n", arguments[each], archive.fingerprint().c_str());
    } catch (const serve::FileError& error) {
      std::printf("error\t%s\t%s\n", arguments[each], error.what());
    }
  }
  serve::Input input("-");
  serve::RequestReader reader(input);
  while (auto request = reader.next()) {
    serve::parse_inputs(*request);
    const std::string text = request->error.empty() ? serve::format_answer(*request, "-", request->inputs)
                                                    : serve::format_error(*request, "-", request->error);
    std::fwrite(text.data(), 1, text.size(), stdout);
  }
}
