# SPDX-License-Identifier: Apache-2.0
"""Packet-level simulation of training jobs on a network; see README.md here."""

from dlcp.sim.scenario import CollectiveJob, FailureSpec, Scenario
from dlcp.sim.simulation import Simulation, SimulationResult, simulate
from dlcp.sim.traffic import BackgroundSpec

__all__ = ["BackgroundSpec", "CollectiveJob", "FailureSpec", "Scenario", "Simulation", "SimulationResult", "simulate"]
