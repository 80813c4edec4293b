"""Options from the environment: SGLang has none for external backends."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbus.errors import ConfigError
from kvbus.protocol.engine import Park
from kvbus.variables import Variable


@dataclass(frozen=True)
class Options:
    attach: Path
    model: str = ""
    engine_id: str = ""
    park: Park = Park.WHEN_FULL

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "Options":
        attach = environment.get(Variable.ATTACH, "")
        if not attach:
            raise ConfigError(
                "--disaggregation-transfer-backend kvbus needs an agent beside this server: set "
                f"{Variable.ATTACH} to its attach socket, such as "
                "/run/kvbus/prefill-0/attach.sock",
                key=Variable.ATTACH,
            )
        park = environment.get(Variable.PARK) or Park.WHEN_FULL
        if park not in list(Park):
            raise ConfigError(
                f"{Variable.PARK} is '{park}': it is one of {', '.join(Park)}", key=Variable.PARK
            )
        return cls(
            attach=Path(attach),
            model=environment.get(Variable.MODEL, ""),
            engine_id=environment.get(Variable.ENGINE_ID, ""),
            park=Park(park),
        )
