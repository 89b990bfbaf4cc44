# SPDX-License-Identifier: Apache-2.0
"""Which options are in force, and who chose them."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Final

from dlcp import configuration
from dlcp.configuration import FILE_VARIABLE, PREFIX, Setting
from dlcp.doctor.finding import Finding, Section, Status
from dlcp.doctor.sockets import payload_for
from dlcp.suggestion import closest

OTHER_VARIABLES: Final = frozenset({FILE_VARIABLE, "DLCP_NATIVE"})
"""Variables that are no options of training, and have a meaning."""
JUMBO_MTU_BYTES: Final = 9000
_INTERNAL: Final = ("DLCP_IN_", "DLCP_TRAIN_")


def examine_options(environment: Mapping[str, str] | None = None) -> tuple[Section, list[Setting]]:
    """Return what there is to say about the options, and all of them."""
    environment = os.environ if environment is None else environment
    section = Section("Options", [])
    if importlib.util.find_spec("torch") is None:
        return section, []
    from dlcp.session.options import Options

    try:
        path = configuration.file_in_force(environment)
        found = configuration.settings(Options, environment)
        configuration.build(Options, environment)
    except ValueError as error:
        section.findings.append(Finding("options", Status.MISSING, str(error), "correct it, or remove it"))
        return section, []
    chosen = [setting for setting in found if not setting.is_default]
    where = f"file {path}" if path else f"no file (dlcp.toml here, or the one that {FILE_VARIABLE} names)"
    text = f"{len(chosen)} chosen, the other {len(found) - len(chosen)} by default; {where}"
    section.findings.append(Finding("origin", Status.OK, text, data={"file": str(path) if path else None}))
    section.findings.extend(_strangers(environment, [setting.name for setting in found]))
    return section, found


def examine_payload(found: Sequence[Setting], mtu_bytes: int, where: str) -> list[Finding]:
    """Compare the packet size that was chosen with the MTU of ``where``."""
    setting = next((setting for setting in found if setting.name == "payload_bytes"), None)
    if setting is None or not isinstance(setting.value, int) or not mtu_bytes:
        return []
    chosen, fits = setting.value, payload_for(min(mtu_bytes, JUMBO_MTU_BYTES))
    data = {"payload_bytes": chosen, "payload_bytes_that_fit": fits}
    if not chosen:
        return [Finding("packet size", Status.OK, f"found out at the start: {fits} bytes of values here", data=data)]
    variable = f"{PREFIX}PAYLOAD_BYTES"
    if chosen > fits:
        text = f"{chosen} bytes of values ({setting.origin}) make packets larger than {where} carries"
        return [
            Finding("packet size", Status.NOTE, text, f"unset {variable}, or {variable}={fits} on every rank", data)
        ]
    if fits >= 2 * chosen:
        text = f"{chosen} bytes of values ({setting.origin}); {where} carries {fits}"
        return [Finding("packet size", Status.NOTE, text, f"unset {variable}: fewer packets, less work", data)]
    return [Finding("packet size", Status.OK, f"{chosen} bytes of values fit {where}", data=data)]


def _strangers(environment: Mapping[str, str], known: list[str]) -> list[Finding]:
    """Find variables that look like options and are none: a slip of the pen would otherwise go unnoticed."""
    names = [PREFIX + name.upper() for name in known]
    return [
        Finding(variable, Status.NOTE, "set, and no option of that name exists", f"unset it{hint}")
        for variable in sorted(environment)
        if variable.startswith(PREFIX)
        and variable not in (*names, *OTHER_VARIABLES)
        and not variable.startswith(_INTERNAL)
        for hint in [closest(variable, names)]
    ]
