# SPDX-License-Identifier: Apache-2.0
"""Packet-level simulation of training jobs on a network; see README.md here."""

from dlcp.sim.results import Result, simulate
from dlcp.sim.scenario import BackgroundSpec, CollectiveJob, FailureSpec, Scenario
from dlcp.sim.simulation import Simulation

__all__ = ["BackgroundSpec", "CollectiveJob", "FailureSpec", "Result", "Scenario", "Simulation", "simulate"]
