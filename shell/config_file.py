"""The file that `--config` names: options of one command in YAML, by the names of the command line, without dashes.

Every value is taken as it is written, as text (`off` is no boolean here), and parsed as on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping

from shell.removed_options import REMOVED
from tandem.errors import ConfigError
from tandem.options import Option, Section, meant

OPTION = "config"


def read_config_file(path: str, known: Mapping[str, Option]) -> Mapping[str, str]:
    """Returns the text of each option that the file gives. `known`: the command's options, by name.

    Raises ConfigError that names the key if the file cannot be read, or has one that the command does not take.
    """
    import yaml  # here: few processes have a file

    try:
        with open(path, encoding="utf-8") as file:
            given = yaml.load(file, yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--{OPTION}", f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(given or {}, dict):
        raise ConfigError(f"--{OPTION}", f"{path} is not a map of options, such as `kv-memory: 2GiB`")
    return {name: _text(name, value, known) for name, value in (given or {}).items()}


def _text(name: str, value: object, known: Mapping[str, Option]) -> str:
    key = f"--{OPTION}: {name}"
    if name in REMOVED:
        raise ConfigError(key, f"removed: {REMOVED[name]}")
    if name not in known or name == OPTION:
        shown = (each.name for each in known.values() if each.section is not Section.INTERNAL and each.name != OPTION)
        raise ConfigError(key, f"this command has no such option; {meant(name, shown, '`--help` lists what there is')}")
    if isinstance(value, list) and known[name].is_list and all(isinstance(part, str) for part in value):
        return ",".join(value)
    if not isinstance(value, str):
        raise ConfigError(key, f"must be one value{', or a list of values' if known[name].is_list else ''}")
    return value
