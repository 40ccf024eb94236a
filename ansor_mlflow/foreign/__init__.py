"""What comes from elsewhere: how it is read, and what of it may be shown."""

from ansor_mlflow.foreign.reading import plain_value, read_json, read_yaml, typed
from ansor_mlflow.foreign.showing import (
    PrintableFormatter,
    for_shell,
    printable,
    printable_json,
    printable_line,
    without_credentials,
)
from ansor_mlflow.foreign.tables import (
    Code,
    Image,
    Mark,
    Part,
    Report,
    Reported,
    Table,
    duration,
    figure,
    html_of,
    microseconds,
    time_unit,
)
