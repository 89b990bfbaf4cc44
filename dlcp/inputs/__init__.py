# SPDX-License-Identifier: Apache-2.0
"""What users write: options, YAML and JSON files, and errors that say what is wrong with them."""
