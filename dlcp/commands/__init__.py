# SPDX-License-Identifier: Apache-2.0
"""The command line: one module per command of ``dlcp``.

A command imports the packages that do its work when it runs, inside its functions or in a module of ``work``: help then
takes a tenth of a second and needs no extra, and a command works without packages that only others need.
"""
