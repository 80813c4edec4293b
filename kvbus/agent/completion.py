"""Shell completion of an agent's command line. The scripts start no process at a Tab."""

from collections.abc import Iterable
from string import Template

SHELLS = ("bash", "zsh", "fish")

_SCRIPTS = {
    "bash": """\
_$function() {
    local word=$${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    case $${COMP_WORDS[COMP_CWORD-1]} in
        --set)
            compopt -o nospace
            COMPREPLY=($$(compgen -S = -W "$keys" -- "$$word"))
            return ;;
        --show-completion)
            COMPREPLY=($$(compgen -W "$shells" -- "$$word"))
            return ;;
    esac
    if [[ $$word == -* ]]; then
        COMPREPLY=($$(compgen -W "--help --set --print-config --show-completion" -- "$$word"))
    else
        compopt -o filenames
        local IFS=$$'\\n'
        COMPREPLY=($$(compgen -d -- "$$word") $$(compgen -f -X '!*.toml' -- "$$word"))
    fi
}
complete -F _$function $program
""",
    "zsh": """\
#compdef $program
_$program() {
    _arguments \\
        '(- *)--help[show the options]' \\
        '*--set[override one key]:key:{compadd -S = -- $keys}' \\
        '--print-config[print a commented default]' \\
        '--show-completion[print this script]:shell:($shells)' \\
        ':configuration:_files -g "*.toml"'
}
if [[ $$funcstack[1] = _$program ]]; then  # loaded by compinit, at a Tab
    _$program "$$@"
else
    compdef _$program $program
fi
""",
    "fish": """\
complete -c $program -f -a '(__fish_complete_suffix .toml)'
complete -c $program -l help -d 'Show the options'
complete -c $program -l set -x -a '$assignments' -d 'Override one key'
complete -c $program -l print-config -d 'Print a commented default'
complete -c $program -l show-completion -x -a '$shells' -d 'Print this script'
""",
}


def completion_script(shell: str, program: str, keys: Iterable[str]) -> str:
    names = list(keys)
    return Template(_SCRIPTS[shell]).substitute(
        program=program,
        function=program.replace("-", "_"),
        keys=" ".join(names),
        assignments=" ".join(f"{name}=" for name in names),
        shells=" ".join(SHELLS),
    )
