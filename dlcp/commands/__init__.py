# SPDX-License-Identifier: Apache-2.0
"""The command line: one module per command of ``dlcp``.

A command imports the packages that do its work inside its functions: ``dlcp --help`` then takes a tenth of a second,
and a command works without packages that only others need.
"""
