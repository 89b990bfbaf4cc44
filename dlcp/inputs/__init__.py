# SPDX-License-Identifier: Apache-2.0
"""User input: options, YAML and JSON files, and errors that explain what is wrong with them."""
