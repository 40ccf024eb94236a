"""The command `doctor`: is this machine, and what it talks to, fit for tuning; and the part that `main` begins with."""

from ansor_mlflow.commands.doctor.examination import Diagnosis, examine, warn_of_the_machine
from ansor_mlflow.commands.doctor.machine import Check
