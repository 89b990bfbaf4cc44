# SPDX-License-Identifier: Apache-2.0
"""Packet-level simulation of training jobs on a network; see README.md here."""

from dlcp.sim.experiments.scenario_run import SimulationResult, simulate
from dlcp.sim.scenario import CollectiveJob, FailureSpec, Scenario, TrafficSpec
from dlcp.sim.simulation import Simulation

__all__ = ["CollectiveJob", "FailureSpec", "Scenario", "Simulation", "SimulationResult", "TrafficSpec", "simulate"]
