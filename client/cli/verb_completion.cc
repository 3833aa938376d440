// `muonctl completion`: a script for the shell, made from the verbs and options that there are.
#include <memory>
#include <ostream>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/verb.h"

namespace muond::cli {
namespace {

std::vector<std::string> OptionsOf(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

std::string Bash(const CLI::App& app) {
  std::vector<std::string> verbs;
  std::string cases;
  for (const CLI::App* verb : app.get_subcommands({})) {
    verbs.push_back(verb->get_name());
    cases += absl::StrFormat("    %s) words+=\" %s\" ;;\n", verb->get_name(),
                             absl::StrJoin(OptionsOf(*verb), " "));
  }
  return absl::StrFormat(
      "# muonctl's completion for bash; zsh: autoload bashcompinit && bashcompinit first.\n"
      "_muonctl() {\n"
      "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} verb= w\n"
      "  local verbs=\"%s\" words=\"%s\"\n"
      "  for w in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n"
      "    [[ \" $verbs \" == *\" $w \"* ]] && { verb=$w; break; }\n"
      "  done\n"
      "  case $before in\n"
      "    -o|--output) words=\"table json csv\" ;;\n"
      "    *) case $verb in\n"
      "    '') words+=\" $verbs\" ;;\n"
      "%s"
      "    esac ;;\n"
      "  esac\n"
      "  mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$word\")\n"
      "}\n"
      "complete -F _muonctl muonctl\n",
      absl::StrJoin(verbs, " "), absl::StrJoin(OptionsOf(app), " "), cases);
}

std::string Fish(const CLI::App& app) {
  std::string text = "complete -c muonctl -f\n";
  for (const CLI::App* verb : app.get_subcommands({})) {
    text += absl::StrFormat("complete -c muonctl -n __fish_use_subcommand -a %s -d '%s'\n",
                            verb->get_name(), verb->get_description());
  }
  return text;
}

}  // namespace

VerbBody AttachCompletion(CLI::App& command) {
  auto shell = std::make_shared<std::string>("bash");
  command.add_option("shell", *shell, "bash (zsh reads it, too) or fish")
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->capture_default_str();
  command.footer("In ~/.bashrc: source <(muonctl completion)");
  return [shell, &command](VerbContext& context) -> absl::StatusOr<ExitCode> {
    const CLI::App& app = *command.get_parent();
    context.out << (*shell == "fish" ? Fish(app) : Bash(app));
    return kOk;
  };
}

}  // namespace muond::cli
